"""Stand-in for ComfyUI's folder_paths: files are named by their paths."""


def get_filename_list(kind):
    return []


def get_full_path_or_raise(kind, name):
    return name
