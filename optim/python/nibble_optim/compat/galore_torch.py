"""GaLoreAdamW and GaLoreAdamW8bit of galore_torch; min_8bit_size counts the whole tensor here. Groups with a rank have
one rank, gap and scale in common. Directions span what those of
galore_torch span, without being rotated to singular vectors."""
from . import absent, drop_in

ADAMW = "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, correct_bias=True, "


def projected(name, kinds):
    def settings(optimizer, values):
        groups, shared = list(values["params"]), {}
        groups = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
        for i, group in enumerate(groups):
            group = groups[i] = {"rule": kinds[group.get("scale_type")] if "rank" in group else "adamw", **group}
            for key, own in (("rank", "rank"), ("update_proj_gap", "rank_gap"), ("scale", "rank_scale")):
                if key in group and shared.setdefault(own, group[key]) != group.pop(key):
                    raise ValueError(f"{name}: groups of several values of {key} were found; give all groups one")
            for key in ("proj_type", "proj", "scale_type"):
                group.pop(key, None)
        values["params"] = groups
        return shared
    return settings


GaLoreAdamW = drop_in("GaLoreAdamW", ADAMW + "no_deprecation_warning=False", projected("GaLoreAdamW", {None: "galore"}),
                      m="fp32", v="fp32")


def _settings8(optimizer, values):
    values.pop("optim_bits")  # they are 8 there, too
    return {**projected("GaLoreAdamW8bit", {None: "galore"})(optimizer, values), "min_quantized": values.pop("min_8bit_size")}


GaLoreAdamW8bit = drop_in("GaLoreAdamW8bit", "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, "
                          "optim_bits=32, args=None, min_8bit_size=4096, percentile_clipping=100, block_wise=True, "
                          "is_paged=False", _settings8, m="dyn8/256", v="udyn8/256")
GaLoreAdafactor = absent("GaLoreAdafactor", 'take Optimizer(preset="galore8") or "adafactor8"')
