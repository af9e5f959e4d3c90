#!/usr/bin/env python3
"""Write `tests/fixtures/chat_templates.json`: what transformers makes of conversations by public chat templates.

    scripts/fetch-smollm2
    pip install torch transformers==5.2.0 gguf==0.19.0
    python3 tests/conformance/chat_fixtures.py

SmolLM2's template is that of its GGUF file, the others are those that Mistral 7B Instruct v0.1 and Llama 2 Chat came with.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

MODEL = Path("models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Blocks on lines of their own, as newer templates have them.
LINES = """{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content.strip() %}
    {%- endif %}
{%- endfor %}
{{ bos_token }}{{ ns.system }}
{% for message in messages if message.role != 'system' %}
    {% if message.content.startswith('!') %}
<{{ message.role | upper }}>{{ message.content | tojson }}
    {% else %}
<{{ message.role }}>{{ message.content | trim }}</{{ message.role }}>
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CONVERSATIONS = [
    [turn("user", "What is the capital of France?")],
    [turn("user", "  Two lines,\nwith {{ braces }} and <|im_end|>. "), turn("assistant", "Yes."), turn("user", "!\"Why\"? <b>")],
    [turn("system", "Be brief."), turn("user", "Hello"), turn("assistant", " Hi! "), turn("user", "naïve – ∑?")],
    [turn("assistant", "Nobody asked.")],
]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)
    smollm2 = tokenizer.chat_template
    templates = []
    for name, template, bos, eos in [
        ("SmolLM2", smollm2, tokenizer.bos_token, tokenizer.eos_token),
        ("Mistral", MISTRAL, "<s>", "</s>"),
        ("Llama 2", LLAMA_2, "<s>", "</s>"),
        ("lines", LINES, "<s>", "</s>"),
    ]:
        tokenizer.bos_token, tokenizer.eos_token = bos, eos
        cases = []
        for messages in CONVERSATIONS:
            for answer in (False, True):
                case: dict[str, object] = {"messages": messages, "answer": answer}
                given = {"chat_template": template, "add_generation_prompt": answer}
                try:
                    case["text"] = tokenizer.apply_chat_template(messages, tokenize=False, **given)
                    if name == "SmolLM2":
                        case["tokens"] = list(tokenizer.apply_chat_template(messages, **given)["input_ids"])
                except Exception as error:  # a template's own refusal
                    case["refused"] = str(error)
                cases.append(case)
        templates.append({"name": name, "template": template, "bos": bos, "eos": eos, "cases": cases})
    path = Path("tests/fixtures/chat_templates.json")
    path.write_text(json.dumps(templates, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
