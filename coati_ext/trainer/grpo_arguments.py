"""Arguments of ColossalChat's `GRPOTrainer`: what generation takes of them, and what is refused, each with a reason."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from coati_ext.models.generation import Sampling

# Argument -> (values that change nothing, why others are refused).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "vf_coef": ((None,), "GRPO has no value function"),
    "value_clip": ((None,), "GRPO has no value function"),
    "sample_buffer": ((False,), "every completion is trained on, in each of num_update_steps passes"),
    "apply_loss_mask": ((True,), "without the mask the loss covers prompts and padding, which no policy chose"),
    "save_interval": ((0,), "states are saved by coati_ext.trainer.state.StateKeeper, given to fit as after_tick"),
    "use_tts_inference": ((False,), "a thinking budget that forces an answer is not built"),
    "tts_config": ((None,), "a thinking budget that forces an answer is not built"),
    "callbacks": ((None, []), "fit takes after_episode and after_tick"),
}
# Of **generate_kwargs: what only says how transformers would generate.
_WITHOUT_EFFECT = {"use_cache", "update_model_kwargs_fn", "prepare_inputs_fn", "pad_token_id"}
DEFAULT_MAX_NEW_TOKENS = 256


def refuse_arguments(**given: Any) -> None:
    """
    Raises:
        ValueError: an argument of `_REFUSED` with a value that would have to change something.
    """
    for name, value in given.items():
        harmless, why = _REFUSED[name]
        if value not in harmless:
            raise ValueError(f"GRPOTrainer: {name}={value!r} is refused: {why}; leave it out")


def generate_settings(tokenizer: PreTrainedTokenizerBase, given: dict[str, Any]) -> Sampling:
    """How completions are drawn, from `GRPOTrainer`'s **generate_kwargs.

    Raises:
        ValueError: an unknown argument, do_sample=False, or no token that ends a completion.
    """
    given = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    if not given.pop("do_sample", True):
        raise ValueError("GRPOTrainer: do_sample=False draws the same completion each time; leave it out")
    stop_ids = given.pop("stop_token_ids", None)
    stop_ids = [tokenizer.eos_token_id] if stop_ids is None else stop_ids
    stop_ids = [stop_ids] if isinstance(stop_ids, int) else list(stop_ids)
    if not stop_ids or not all(isinstance(token, int) for token in stop_ids):
        raise ValueError(f"GRPOTrainer: stop_token_ids is {stop_ids}; expected the ids of one or more tokens")
    settings: dict[str, Any] = {"stop_ids": tuple(stop_ids), "max_new_tokens": DEFAULT_MAX_NEW_TOKENS}
    for name in ("temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens"):
        if given.get(name) is not None:
            settings[name] = given[name]
        given.pop(name, None)
    settings["stop_strings"] = tuple(given.pop("stop_strings", ()))
    if given:
        raise ValueError(
            f"GRPOTrainer has no argument {', '.join(given)}; of generation it takes temperature, top_p, top_k, "
            "max_new_tokens, min_new_tokens, stop_token_ids and stop_strings"
        )
    return Sampling(**settings)
