"""Files of options: ``--config`` of each command."""

import pytest

import para_core.cli.generate
from para_core.cli.app import app, run

FILES = {
    "o.yaml": "steps: 3\nranks: 2\nsize: 64x48\nlora: [a/b, c/d:0.5]\nvae: true\ncompile: no\nnegative_prompt: none\n",
    "o.json": '{"steps": 3, "ranks": 2, "size": "64x48", "lora": ["a/b", "c/d:0.5"], "vae": true, "compile": "no",'
    '"negative-prompt": "none"}',
    "o.toml": "steps = 3\nranks = 2\nsize = '64x48'\nlora = ['a/b', 'c/d:0.5']\nvae = true\ncompile = 'no'\n"
    "negative-prompt = 'none'\n",
}


@pytest.fixture
def checked(monkeypatch):
    """Return the options of each ``generate``, which ends when its options have been read."""
    calls = []

    def check(model, options, **rest):
        calls.append({"model": model, "run": options, **rest})
        raise RuntimeError("stop here")

    monkeypatch.setattr(para_core.cli.generate.checks, "check", check)
    return calls


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file in the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="o.yaml"):
        (tmp_path / name).write_text(text)
        return name

    return write


@pytest.mark.parametrize("name", FILES)
def test_file_sets_options_that_the_line_does_not(checked, write, name):
    arguments = ["generate", "--prompt", "a", "--config", write(FILES[name], name)]
    for extra, rotate in (([], False), (["--no-vae", "--lora", "e/f", "--steps", "5"], True)):
        assert run([*arguments, *extra]) == 1
        options = checked.pop()["run"]
        assert (options.vae, options.compile) == (not rotate, "no")
        assert options.lora == (["e/f"] if rotate else ["a/b", "c/d:0.5"])


def test_later_file_and_section_of_the_command_win(checked, write):
    first = write("dtype: float32\ngenerate: {cache: 0.1, weights: fsdp}\nserve: {port: 1, cors: [a]}\n", "a.yaml")
    second = write("cache: 0.2\n", "b.yml")
    assert run(["generate", "--prompt", "a", "--config", first, "--config", second]) == 1
    options = checked.pop()["run"]
    assert (options.dtype, options.cache, options.weights) == ("float32", "0.2", "fsdp")
    both = write("cache: 0.2\ngenerate: {cache: 0.1}\n", "c.yaml")
    assert run(["generate", "--prompt", "a", "--config", both]) == 1
    assert checked.pop()["run"].cache == "0.1"


def test_second_name_of_a_flag_and_of_an_option_are_keys(checked, write):
    config = write("no-vae: false\nattention-backend: math\n")
    assert run(["generate", "--prompt", "a", "--config", config]) == 1
    options = checked.pop()["run"]
    assert (options.vae, options.backend) == (True, "math")


def test_configs_of_a_model_stand_beside_files_or_in_them(checked, write):
    assert run(["generate", "--prompt", "a", "--config", write("dtype: float32\n"), "--config", "owner/name"]) == 1
    assert checked.pop()["run"].config == ["owner/name"]
    assert run(["generate", "--prompt", "a", "--config", write("config: owner/name\nmodel: a.gguf\n")]) == 1
    call = checked.pop()
    assert (call["run"].config, call["model"]) == (["owner/name"], "a.gguf")


def test_missing_value_is_named_as_an_option(write, capsys):
    assert run(["generate", "--prompt", "a", "--config", write("compile: foo\n")]) == 2
    assert "--compile is 'foo'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ranks: four", "'--ranks'"),
        ("ranks: 4.5", "'--ranks'"),
        ("ranks: true", "'--ranks'"),
        ("vae: maybe", "'--vae'"),
        ("no-vae: maybe", "'maybe' for no-vae"),
        ("fps: 0", "--fps"),
        ("ranks: [1, 2]", "['1', '2'] for ranks"),
        ("ranks: {a: 1}", "{'a': '1'} for ranks"),
        ("lora: [[a]]", "lora"),
        ("rank: 4", "Did you mean ranks?"),
        ("runs: 3", "bench"),
        ("bench: {rins: 1}", "Did you mean runs?"),
        ("bench: 1", "'1' for bench"),
        ("help: true", "'help'"),
        ("ranks: 1\nranks: 2", "'ranks' is there twice"),
        ("resident-blocks: 1\nresident_blocks: 2", "'resident-blocks' is there twice"),
        ("a: &a [*a]", "no YAML"),
        ("a: b: c", "no YAML"),
        ("- a", "'a'"),
        ("config: other.yaml", "'other.yaml'"),
    ],
)
def test_bad_file_is_refused(write, capsys, text, named):
    assert run(["generate", "--prompt", "a", "--config", write(text)]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("o.json", '{"ranks": 1, "ranks": 2}', "twice"),
        ("o.json", '{"ranks": null}', "null for ranks"),
        ("o.json", "{", "no JSON"),
        ("o.toml", "ranks = ", "no TOML"),
        ("o.json", '{"ranks": 4.5}', "'--ranks'"),
    ],
)
def test_bad_json_and_toml_are_refused(write, capsys, name, text, named):
    assert run(["generate", "--prompt", "a", "--config", write(text, name)]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--config", "absent.yaml"], ["--config", "a/b", "--config", "c/d"]])
def test_bad_values_of_the_option_are_refused(write, capsys, arguments):
    write("")
    assert run(["generate", "--prompt", "a", *arguments]) == 2
    assert arguments[1] in capsys.readouterr().err


@pytest.mark.parametrize("command", [command.name for command in app.registered_commands])
def test_every_command_reads_files(write, capsys, command):
    assert run([command, "--config", write("no-such-option: 1\n")]) == 2
    assert "'no-such-option'" in capsys.readouterr().err


def test_a_command_without_a_model_takes_only_files_of_options(capsys):
    assert run(["doctor", "--config", "owner/name"]) == 2
    assert "owner/name" in capsys.readouterr().err
