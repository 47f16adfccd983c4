import pytest
from slipstream.core.models.model_sizes import ModelSizes
from slipstream.extensions.drafts.shape import model_problems

PLAIN = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 99,
}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 8}, "latent attention"),
        ({"linear_num_key_heads": 2, "linear_num_value_heads": 4}, "delta nets"),
        ({"use_sliding_window": True, "sliding_window": 32}, "sliding windows"),
    ],
)
def test_a_model_with_other_attention_gets_no_layer(
    fields: dict[str, object], what: str
) -> None:
    assert not [*model_problems(ModelSizes.of(PLAIN))]
    (line,) = model_problems(ModelSizes.of(PLAIN | fields))
    assert f"the layer beside {what} was not tested" in line
