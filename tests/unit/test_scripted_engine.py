"""The scripted engine behaves like a real one where tests rely on it."""

import asyncio

import pytest

from rtpo_ray.engines.scripted import ScriptedEngine
from rtpo_ray.errors import EngineError
from rtpo_ray.types import Completion, Sampling

SAMPLING = Sampling(temperature=1.0, max_tokens=3, stop_token_ids=(0,), seed=1)


def ask(engine: ScriptedEngine, context: tuple[int, ...] = (5, 6)) -> Completion:
    return asyncio.run(engine.generate(context, SAMPLING))


def test_replies_are_recorded_and_cut_like_a_real_engine() -> None:
    engine = ScriptedEngine(lambda context, sampling: [context[0], 0, 9], weight_version=4)
    assert ask(engine) == Completion(token_ids=(5, 0), logprobs=(-0.5, -0.5), finish_reason="stop", weight_version=4)
    assert engine.requests == [((5, 6), SAMPLING)]
    long = ask(ScriptedEngine(lambda context, sampling: [1, 2, 3, 4]))
    assert (long.token_ids, long.finish_reason) == ((1, 2, 3), "length")


def test_logprobs_can_depend_on_the_response() -> None:
    engine = ScriptedEngine(lambda context, sampling: [1, 2], logprobs=lambda context, response: [-float(token) for token in response])
    assert ask(engine).logprobs == (-1.0, -2.0)


def test_chosen_requests_fail_with_their_own_error() -> None:
    engine = ScriptedEngine(lambda context, sampling: [1], failures={1: RuntimeError("lost")})
    ask(engine)
    with pytest.raises(RuntimeError, match="lost"):
        ask(engine)
    assert ask(engine).token_ids == (1,)
    assert len(engine.requests) == 3


def test_an_overlong_context_and_a_closed_engine_are_refused() -> None:
    engine = ScriptedEngine(lambda context, sampling: [1], max_model_len=4)
    with pytest.raises(EngineError, match="max_model_len 4"):
        ask(engine)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        ask(engine, (5,))


def test_a_push_sets_the_version_and_is_refused_when_incomplete_or_early() -> None:
    engine = ScriptedEngine(lambda context, sampling: [1], weight_names=["a", "b"])
    with pytest.raises(EngineError, match=r"missing \['b'\], unknown \['c'\]"):
        engine.load_weights([("a", None), ("c", None)], version=1)  # type: ignore[list-item]
    engine.load_weights([("a", None), ("b", None)], version=2)  # type: ignore[list-item]
    assert (engine.weight_version, engine.loaded, ask(engine).weight_version) == (2, [(2, ("a", "b"))], 2)

    async def push_early() -> None:
        request = asyncio.create_task(engine.generate((5,), SAMPLING))
        await asyncio.sleep(0)
        try:
            engine.load_weights([("a", None), ("b", None)], version=3)  # type: ignore[list-item]
        finally:
            await request

    with pytest.raises(EngineError, match="1 requests are open"):
        asyncio.run(push_early())
    assert engine.weight_version == 2
