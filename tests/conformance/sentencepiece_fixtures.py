#!/usr/bin/env python3
"""Write tests/fixtures/sentencepiece.json: a small tokenizer of SentencePiece, and what its library says of some texts.

    pip install sentencepiece==0.2.3 protobuf
    python3 tests/conformance/sentencepiece_fixtures.py

Trained on this project's documents with the options of Llama 2's: BPE, bytes for what has no token, no normalisation. `tokens`,
`scores` and `kinds` are the lists of a GGUF file (kinds as llama.cpp numbers them), `merges` the pairs that transformers'
`SentencePieceExtractor` makes of the scores, `cases` texts with their tokens, with a space before the text and, in `cases_without_space`,
without one.
"""

import io
import json
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

ROOT = Path(__file__).parents[2]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = [
    "the key of the red door",
    "It's 2024, isn't it?",
    "  two spaces, and  more   inside ",
    "\tTabs\nand\n\n\nline breaks\r\n",
    "naïve Ünïcödé ЁЖ 漢字かな ∑∞ 🙂",
    "attention attention attention",
    "kvsieve evict --policy snapkv --budget 0.25",
    "▁",
    "a",
    "<0x0A> is no byte",
]
# With a space before every text llama.cpp and transformers put one behind such a token too, where SentencePiece puts none.
ADDED = "memory<sep>memory"


def trained():
    text = "\n".join(path.read_text() for path in sorted(ROOT.glob("docs/adding-*.md")))
    to = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()), model_writer=to, model_type="bpe", vocab_size=420, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        allow_whitespace_only_pieces=True, user_defined_symbols=["<sep>"], character_coverage=0.995, num_threads=1, minloglevel=2,
    )  # fmt: skip
    return to.getvalue()


def kind(model, token):
    if model.is_unknown(token):
        return UNKNOWN
    if model.is_control(token):
        return CONTROL
    if model.is_byte(token):
        return BYTE
    return USER_DEFINED if model.id_to_piece(token) == "<sep>" else NORMAL


proto = sentencepiece_model_pb2.ModelProto.FromString(trained())
model = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
proto.normalizer_spec.add_dummy_prefix = False
without = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
tokens = [model.id_to_piece(token) for token in range(len(model))]
scores = [model.get_score(token) for token in range(len(model))]
numbers = {token: number for number, token in enumerate(tokens)}
pairs = []
for token, score in zip(tokens, scores):
    cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
    cuts = [cut for cut in cuts if cut[0] in numbers and cut[1] in numbers]
    pairs += [(cut, score) for cut in sorted(cuts, key=lambda cut: (numbers[cut[0]], numbers[cut[1]]))]
pairs.sort(key=lambda pair: (pair[1], len(pair[0][0]), len(pair[0][1])), reverse=True)
fixture = {
    "tokens": tokens,
    "scores": scores,
    "kinds": [kind(model, token) for token in range(len(model))],
    "merges": [list(cut) for cut, _ in pairs],
    "cases": [[text, model.encode(text)] for text in TEXTS],
    "cases_without_space": [[text, without.encode(text)] for text in [*TEXTS, ADDED]],
}
to = ROOT / "tests/fixtures/sentencepiece.json"
lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in fixture.items())
to.write_text("{" + lines + "}\n")
print(f"{to}: {len(tokens)} tokens, {len(pairs)} pairs")
