"""Files of options: ``--config`` of each command."""

from unittest import mock

import pytest

import para_core.cli.generate
from para_core.cli.app import app, run

FILES = {
    "o.yaml": "steps: 3\nlora: [a/b, c/d:0.5]\nvae: true\ncompile: no\nnegative_prompt: none\n",
    "o.json": '{"steps": 3, "lora": ["a/b", "c/d:0.5"], "vae": true, "compile": "no", "negative-prompt": "none"}',
    "o.toml": "steps = 3\nlora = ['a/b', 'c/d:0.5']\nvae = true\ncompile = 'no'\nnegative-prompt = 'none'\n",
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file in the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="o.yaml"):
        (tmp_path / name).write_text(text)
        return name

    return write


@pytest.fixture
def read(monkeypatch):
    """Return a function of files and further words that returns the model and options that ``generate`` has read."""
    check = mock.Mock(side_effect=RuntimeError("stop here"))
    monkeypatch.setattr(para_core.cli.generate.checks, "validate", check)

    def read(*files, words=()):
        configs = [word for file in files for word in ("--config", file)]
        assert run(["generate", "--prompt", "a", *configs, *words]) == 1
        return check.call_args.args

    return read


@pytest.mark.parametrize("name", FILES)
def test_file_sets_options_that_the_line_does_not(read, write, name):
    for words, changed in (((), False), (("--no-vae", "--lora", "e/f", "--steps", "5"), True)):
        _, options = read(write(FILES[name], name), words=words)
        assert (options.vae, options.compile) == (not changed, "no")
        assert options.lora == (["e/f"] if changed else ["a/b", "c/d:0.5"])


def test_later_file_section_of_the_command_and_second_names(read, write):
    first = write("dtype: float32\ngenerate: {cache: 0.1, weights: fsdp}\nbench: {runs: 1, warmup-runs: 2}\n", "a.yaml")
    _, options = read(first, write("cache: 0.2\n", "b.yml"))
    assert (options.dtype, options.cache, options.weights) == ("float32", "0.2", "fsdp")
    assert read(write("cache: 0.2\ngenerate: {cache: 0.1}\n", "c.yaml"))[1].cache == "0.1"
    _, options = read(write("no-vae: false\nattention-backend: math\n"))
    assert (options.vae, options.backend) == (True, "math")
    # Configs of a model stand beside files, or in them.
    assert read(write("dtype: float32\n"), "owner/name")[1].config == ["owner/name"]
    model, options = read(write("config: owner/name\nmodel: a.gguf\n"))
    assert (options.config, model) == (["owner/name"], "a.gguf")
    with pytest.raises(RuntimeError, match="stop here"):
        read(write("debug: true\n"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ranks: 4.5", "'--ranks'"),
        ("no-vae: maybe", "'maybe' for no-vae"),
        ("fps: 0", "--fps"),
        ("ranks: [1, 2]", "['1', '2'] for ranks"),
        ("rank: 4", "Did you mean ranks?"),
        ("runs: 3", "bench"),
        ("bench: {rins: 1}", "Did you mean runs?"),
        ("help: true", "'help'"),
        ("ranks: 1\nranks: 2", "'ranks' is there twice"),
        ("vae: true\nno-vae: true", "vae and no-vae"),
        ("negative-prompt: ~", "null for negative-prompt"),
        ("a: &a [*a]", "no YAML"),
        ("attention-backend: foo", "--backend is 'foo'"),
        ("config: other.yaml", "'other.yaml'"),
        ('{"ranks": 1, "ranks": 2}', "twice"),
        ("{", "no JSON"),
        ("ranks = ", "no TOML"),
        ("ranks = 1\nlora = [[2020-01-01]]", "for lora"),
    ],
)
def test_bad_file_is_refused(write, capsys, text, named):
    ending = {"{": "json", "ranks = ": "toml"}
    name = next((f"o.{end}" for start, end in ending.items() if text.startswith(start)), "o.yaml")
    assert run(["generate", "--prompt", "a", "--config", write(text, name)]) == 2
    assert named in capsys.readouterr().err


def test_bad_values_of_the_option_are_refused_and_every_command_reads_files(write, capsys):
    for names in (["absent.yaml"], ["a/b", "c/d"]):
        assert run(["generate", "--prompt", "a", *[word for name in names for word in ("--config", name)]]) == 2
        assert names[0] in capsys.readouterr().err
    for command in app.registered_commands:
        assert run([command.name, "--config", write("no-such-option: 1\n")]) == 2
        assert "'no-such-option'" in capsys.readouterr().err
