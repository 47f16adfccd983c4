"""Records of Llama, and of ERNIE 4.5, Seed-OSS, SmolLM3 and CWM, which compute almost the same."""

from slipstream.core.models.family import ANY_BIAS, DENSE, FULL, OFF, SLIDING, Family

FAMILIES = (
    Family(architecture="LlamaForCausalLM", model_type="llama", values=DENSE, has_engine_bits=True),
    Family(architecture="Ernie4_5ForCausalLM", model_type="ernie4_5", values=DENSE, is_tied=True),
    Family(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        values={**DENSE, "attention_bias": ANY_BIAS},
    ),
    Family(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        values={**DENSE, "use_sliding_window": OFF},
        # Some layers have no positions.
        read=("no_rope_layers", "no_rope_layer_interval"),
        is_tied=True,
    ),
    Family(
        architecture="CwmForCausalLM",
        model_type="cwm",
        values=DENSE,
        layer_kinds=(FULL, SLIDING),
        has_windows=True,
    ),
)
