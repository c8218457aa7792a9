"""`from_pretrained` of transformers, with operators.

    from_pretrained(path, quantization_config=KTInjectConfig(…)) ────────────────────┐
    from_pretrained(folder whose config.json holds ours) ──► transformers makes the  ├─► load.py ─► `ktinject.optimize`
                          quantizer of our plug-in (hf/plugin.py), which hands over ─┘

So there is one way of loading, for every checkpoint that it reads. What transformers offers to quantizers is to change
a model before its own loader fills it; that one knows neither all formats nor what operators take as it is stored.
"""

from __future__ import annotations

import importlib

from ktinject.hf.on_import import when_imported


def register() -> None:
    """Make transformers know the quantisation method "ktinject": now if it is imported, else as soon as it is."""
    when_imported(
        "transformers.modeling_utils", lambda: importlib.import_module("ktinject.pretrained.door").install()
    )
