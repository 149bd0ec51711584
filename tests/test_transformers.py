"""Networks of the package transformers, built from a config: trained, quantized, saved, reloaded, exported."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import qupel
from qupel.core.layout import Layout
from qupel.deploy import open_model

transformers = pytest.importorskip("transformers")
WORDS, LENGTH = 30, 8


class Logits(nn.Module):
    """What it gives is a ModelOutput; we want one tensor."""

    def __init__(self, net, last=False):
        super().__init__()
        self.net, self.last = net, last

    def forward(self, tokens):
        logits = self.net(tokens.long()).logits
        return logits[:, -1] if self.last else logits


def bert():
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=16, num_labels=3, **small, **still)
    return Logits(transformers.BertForSequenceClassification(config))


def gpt2():
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    small = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(vocab_size=WORDS, use_cache=False, **small, **still)
    return Logits(transformers.GPT2LMHeadModel(config), last=True)


@pytest.mark.parametrize(
    ("make", "share", "left"),
    [
        (bert, 0.77, ["net.bert.embeddings.word_embeddings.weight", "net.classifier.weight"]),
        pytest.param(  # its head is tied to its embedding; its layers are of a kind of their own
            *(gpt2, 0.82, ["net.transformer.wte.weight"]), marks=pytest.mark.slow
        ),
    ],
)
def test_from_a_config_to_onnx(make, share, left, tmp_path):
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    net = make()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, WORDS, (12, LENGTH))
    targets = tokens[:, -1] % 3 if make is bert else tokens[:, -1]
    found = qupel.fit(net, [(tokens, targets, tokens, targets)], method="local", rounds=2, local_steps=2, batch=4)
    layout = Layout.of(net)
    assert sum(layout[name].size for name in found.quantized[0]) / layout.size == pytest.approx(share, abs=0.01)
    assert [name for name in found.left[0] if len(layout[name].shape) > 1] == left
    (path,) = found.save(tmp_path)
    again = qupel.load(path, copy.deepcopy(net))
    x = torch.from_numpy(tokens)
    with torch.inference_mode():
        wanted = found.models[0](x)
        assert torch.equal(again(x), wanted)
    found = replace(found, about=replace(found.about, dtype="int64"))
    (path,) = found.save(tmp_path, to="onnx")
    model = open_model(path, trust=make is gpt2)  # whose graph computes sizes that are not known beforehand
    np.testing.assert_allclose(model.run(tokens), wanted, rtol=1e-4, atol=1e-5)
