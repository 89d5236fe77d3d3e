"""Every transformer of a pipeline is parallel, not the first alone."""

from tests.adapters.test_pipelines import build, generate
from tests.tiny import cpu_mesh


def tokens_by_transformer():
    pipe, seen = build("ideogram 4", cpu_mesh(1, 2)), {}
    for name in ("transformer", "unconditional_transformer"):

        def note(module, args, kwargs, name=name):
            seen[name] = (args[0] if args else kwargs["hidden_states"]).shape[1]

        getattr(pipe, name).layers[0].register_forward_pre_hook(note, with_kwargs=True)
    generate(pipe, "ideogram 4", num_inference_steps=1)
    return seen


def test_unconditional_transformer_of_ideogram_4_is_sharded(rank_pool):
    # 9 tokens of text and 15 of the image, and these 15 alone.
    first, second = rank_pool.run(tokens_by_transformer, 2)
    assert first == {"transformer": 12, "unconditional_transformer": 8}
    assert second == {"transformer": 12, "unconditional_transformer": 7}


def calls_by_transformer():
    pipe, calls = build("ideogram 4", cpu_mesh(1, 1, batch=2)), {"transformer": 0, "unconditional_transformer": 0}
    for name in calls:

        def note(module, args, name=name):
            calls[name] += 1

        getattr(pipe, name).layers[0].register_forward_pre_hook(note)
    generate(pipe, "ideogram 4")
    return calls


def test_ideogram_4_distributes_branches_of_two_transformers(rank_pool):
    # Its blocks cannot be foreseen, so both ranks compute the first of three steps.
    first, second = rank_pool.run(calls_by_transformer, 2)
    assert first == {"transformer": 3, "unconditional_transformer": 1}
    assert second == {"transformer": 1, "unconditional_transformer": 3}
