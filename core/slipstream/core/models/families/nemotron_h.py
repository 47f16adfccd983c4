"""The record of Nemotron-H, in which each layer is either a Mamba layer, attention or an MLP.

Published files give the layers' kinds as a pattern of letters, files of transformers 5 as a list.
"""

from collections.abc import Iterator, Mapping

from slipstream.core.models.family import DENSE, FULL, LINEAR, MAMBA, OFF, Family, Shape, Table

NAME = "NemotronHForCausalLM"
KINDS: Mapping[str, str] = {"M": LINEAR, "*": FULL, "-": "mlp"}
# Numbers without which the shapes of the tensors are not known.
_NEEDED = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
# transformers' value, which vLLM takes too, if config.json has none.
_HEAD_DIM = 128
_EXPERTS = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size")


def layer_kinds(values: Table) -> list[str]:
    """Returns the kind of each layer, or [] if config.json does not say it.

    An unknown letter of the pattern is returned unchanged.
    """
    kinds = values.get("layers_block_type")
    if kinds is None:
        kinds = [
            KINDS.get(letter, letter) for letter in values.get("hybrid_override_pattern") or ""
        ]
    return list(kinds)


def usual_fields(values: Table) -> Table:
    """Returns a config.json with `num_hidden_layers` and `head_dim`, as other families have them.

    Fields of experts, which transformers writes for models without experts too, are left out.
    """
    found = {name: value for name, value in values.items() if name not in _EXPERTS}
    usual = {"num_hidden_layers": len(layer_kinds(values)), "head_dim": _HEAD_DIM}
    return {**usual, **found, "num_hidden_layers": usual["num_hidden_layers"]}


def hybrid_problems(values: Table) -> Iterator[str]:
    """Yields one line for each rule that the fields of a Nemotron-H break."""
    pattern, kinds = values.get("hybrid_override_pattern"), layer_kinds(values)
    if not kinds:
        yield (
            f"model.path: a {NAME} needs hybrid_override_pattern or layers_block_type, "
            "which say what each layer is"
        )
    if pattern is not None and [KINDS.get(letter, letter) for letter in pattern] != kinds:
        yield (
            "model.path: hybrid_override_pattern and layers_block_type must say the same of each "
            f"layer, got {pattern!r} and {kinds}"
        )
    for kind in sorted(set(kinds) - set(KINDS.values())):
        yield (
            f"model.path: each layer of a {NAME} must be one of {', '.join(KINDS.values())} "
            f"(in a pattern {', '.join(KINDS)}), got {kind!r}: layers of experts are not trained"
        )
    for name in _NEEDED:
        if not isinstance(values.get(name), int) or values[name] < 1:
            yield f"model.path: {name} of a {NAME} must be a number, got {values.get(name)!r}"
            return
    if values["mamba_num_heads"] % values["n_groups"]:
        yield (
            f"model.path: n_groups must divide the {values['mamba_num_heads']} mamba_num_heads, "
            f"got {values['n_groups']}"
        )


def hybrid_tensors(values: Table, has_tied_output: bool) -> dict[str, Shape]:
    """Returns name and shape of each tensor of a Nemotron-H."""
    usual = usual_fields(values)
    hidden, vocab = usual["hidden_size"], usual["vocab_size"]
    found: dict[str, Shape] = {"backbone.embeddings.weight": (vocab, hidden)}
    for layer, kind in enumerate(layer_kinds(values)):
        shapes = _shapes(usual, kind)
        found[f"backbone.layers.{layer}.norm.weight"] = (hidden,)
        found |= {f"backbone.layers.{layer}.mixer.{name}": shapes[name] for name in shapes}
    found["backbone.norm_f.weight"] = (hidden,)
    if not has_tied_output:
        found["lm_head.weight"] = (vocab, hidden)
    return found


def _shapes(values: Table, kind: str) -> dict[str, Shape]:
    hidden, ffn = values["hidden_size"], values.get("intermediate_size", 0)
    if kind == "mlp":
        return {"up_proj.weight": (ffn, hidden), "down_proj.weight": (hidden, ffn)}
    if kind == "full_attention":
        heads, size = values["num_attention_heads"], values["head_dim"]
        queries, keys = heads * size, (values.get("num_key_value_heads") or heads) * size
        rows = {"q": queries, "k": keys, "v": keys}
        found: dict[str, Shape] = {
            f"{name}_proj.weight": (size, hidden) for name, size in rows.items()
        }
        return found | {"o_proj.weight": (hidden, queries)}
    heads = values["mamba_num_heads"]
    inner = heads * values["mamba_head_dim"]
    channels = inner + 2 * values["n_groups"] * values["ssm_state_size"]
    vectors = dict.fromkeys(("A_log", "D", "dt_bias"), (heads,))
    return {
        **vectors,
        "in_proj.weight": (inner + channels + heads, hidden),
        "conv1d.weight": (channels, 1, values["conv_kernel"]),
        "conv1d.bias": (channels,),
        "norm.weight": (inner,),
        "out_proj.weight": (hidden, inner),
    }


FAMILIES = (
    Family(
        architecture=NAME,
        model_type="nemotron_h",
        values={
            **DENSE,
            "mlp_hidden_act": (None, "relu2"),
            "use_conv_bias": (None, True),
            # vLLM always has a separate output projection.
            "tie_word_embeddings": OFF,
        },
        read=(
            *("hybrid_override_pattern", "layers_block_type", "layer_norm_epsilon", *_NEEDED),
            # transformers writes these fields for a model without experts, too.
            *("n_routed_experts", "n_group", "topk_group", "routed_scaling_factor"),
            "moe_shared_expert_intermediate_size",
            # The layers that predict further tokens are neither loaded nor sampled from.
            "num_nextn_predict_layers",
        ),
        problems=hybrid_problems,
        usual=usual_fields,
        linear=MAMBA,
        tensors=hybrid_tensors,
        cached_layers=lambda values: layer_kinds(values).count(FULL),
        cannot={
            "learner.parallel.cp": "its Mamba layers read the tokens of a sequence in turn",
            "lora.rank": (
                "of layers without attention only the delta nets of a Qwen3NextForCausalLM have "
                "adapters"
            ),
            "rollout_server.quantization": "it was not tested with Mamba layers",
        },
    ),
)
