import argparse

args = argparse.Namespace(cpu=True, flag_of_the_caller=False)
