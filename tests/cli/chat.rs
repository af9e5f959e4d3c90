//! Chat templates: conversations as `transformers` writes them (`conformance/chat_fixtures.py`), in prompts and evaluations.

use crate::byte_model;
use assert_cmd::Command;
use kvsieve::eval::{Frame, Protocol, prompts};
use kvsieve::model::{ChatTemplate, Message, Text};
use kvsieve::task::task;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const SMOLLM2: &str = "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

#[derive(Deserialize)]
struct Template {
    name: String,
    template: String,
    bos: String,
    eos: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    messages: Vec<Message>,
    answer: bool,
    text: Option<String>,
    tokens: Option<Vec<u32>>,
    refused: Option<String>,
}

fn templates() -> Vec<Template> {
    serde_json::from_str(&std::fs::read_to_string("tests/fixtures/chat_templates.json").unwrap()).unwrap()
}

fn parsed(of: &Template) -> ChatTemplate {
    ChatTemplate::parse("model".into(), of.template.clone(), of.bos.clone(), of.eos.clone())
}

#[test]
fn conversations_are_written_as_transformers_writes_them() {
    for template in templates() {
        for case in &template.cases {
            let got = parsed(&template).render(&case.messages, case.answer);
            let (name, messages) = (&template.name, &case.messages);
            match (&case.text, got) {
                (Some(text), Ok(got)) => assert_eq!(&got, text, "{name}, {messages:?}"),
                (None, Err(error)) => {
                    let (said, refused) = (error.to_string(), case.refused.as_ref().unwrap());
                    assert!(said.ends_with(refused) && said.contains("'model'"), "{name}: {said}");
                }
                (_, got) => panic!("{name}, {messages:?}: {got:?}"),
            }
        }
    }
}

/// JSON as Python writes it, and what a conversation without tools and documents has in their place.
#[test]
fn json_is_python_s_and_tools_are_none() {
    let source = "{% if tools is none and documents is none %}{{ messages | tojson }}|{{ [1, {}] | tojson(indent=2) }}{% endif %}";
    let template = ChatTemplate::parse("model".into(), source.into(), String::new(), String::new());
    let text = template.render(&user("<a> é"), true).unwrap();
    assert_eq!(text, "[{\"role\": \"user\", \"content\": \"<a> é\"}]|[\n  1,\n  {}\n]");
}

/// The file's own template and tokens, where it is there.
#[test]
fn a_gguf_file_brings_its_template() {
    if !Path::new(SMOLLM2).exists() {
        println!("skipped: {SMOLLM2} is not there; scripts/fetch-smollm2 fetches it");
        return;
    }
    let (template, text) = (ChatTemplate::open(Path::new(SMOLLM2)).unwrap(), Text::open(Path::new(SMOLLM2)).unwrap());
    for case in &templates()[0].cases {
        let written = template.render(&case.messages, case.answer).unwrap();
        assert_eq!(Some(text.piece(&written).unwrap()), case.tokens, "{written}");
    }
}

/// A model of bytes, with this `tokenizer_config.json`.
fn folder(to: &Path, config: &Value) -> PathBuf {
    byte_model::write(to, 2048);
    configure(to, config);
    to.into()
}

fn configure(folder: &Path, config: &Value) {
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}

fn user(words: &str) -> [Message; 1] {
    [Message { role: "user".into(), content: words.into() }]
}

#[test]
fn a_folder_brings_its_template_in_one_of_three_ways() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = folder(temporary.path(), &json!({}));
    let written = || ChatTemplate::open(&folder)?.render(&user("x"), true);
    let said = || written().unwrap_err().to_string();
    assert!(said().contains("no chat template") && said().contains("leave --chat out"), "{}", said());
    configure(
        &folder,
        &json!({ "bos_token": { "content": "<s>" }, "chat_template": "{{ bos_token + messages[0].content }}" }),
    );
    assert_eq!(written().unwrap(), "<s>x");
    let named = json!([{ "name": "tool_use", "template": "t" }, { "name": "default", "template": "d{{ eos_token }}" }]);
    configure(&folder, &json!({ "eos_token": "</s>", "chat_template": named }));
    assert_eq!(written().unwrap(), "d</s>");
    std::fs::write(folder.join("chat_template.jinja"), "j").unwrap();
    assert_eq!(written().unwrap(), "j");
    std::fs::write(folder.join("chat_template.jinja"), "{% if %}").unwrap();
    assert!(said().contains("its chat template: ") && !said().contains('\n'), "{}", said());
    let endless = "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}";
    std::fs::write(folder.join("chat_template.jinja"), endless).unwrap();
    assert!(said().contains("its chat template: ") && said().contains("fuel"), "{}", said());
    // One day for all, where a template takes it for granted, and none where it asks.
    let days = [
        ("{{ strftime_now('%d %B %Y, %Y-%m-%d') }}", "26 July 2024, 2024-07-26"),
        ("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}none{% endif %}", "none"),
        // What the model itself says is marked for training.
        ("a\n{%- generation -%}\n b{% endgeneration %}\nc{{ messages[0].content }}", "abcx"),
    ];
    for (template, expected) in days {
        std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
        assert_eq!(written().unwrap(), expected);
    }
    // Not a template of before, where there is one that cannot be read.
    std::fs::write(folder.join("chat_template.jinja"), [0xff, 0xfe]).unwrap();
    assert!(said().contains("chat_template.jinja") && said().contains("UTF-8"), "{}", said());
}

/// Under every protocol the tokens of a prompt, put together, are what the template writes of context and question, and the
/// words with which the answer is begun.
#[test]
fn an_evaluation_asks_in_the_template() {
    let mistral = &templates()[1];
    let temporary = tempfile::tempdir().unwrap();
    let text = Text::open(&folder(temporary.path(), &json!({}))).unwrap();
    let template = parsed(mistral);
    let frame = Frame::chat(&template, &text).unwrap();
    let task = task("passkey").unwrap();
    for protocol in Protocol::ALL {
        for prompt in prompts(("passkey", &*task), 700, (3, 1), protocol, (&text, &frame)).unwrap() {
            let [asked] = &prompt.asked[..] else { panic!("one question") };
            let question = asked.question.as_ref().unwrap();
            let fed = [&prompt.context[..], &asked.prompt].concat();
            let most = fed.len() + asked.expected.len();
            assert!((650..=700).contains(&most), "{most} tokens");
            // The tokenizer's text leaves special tokens out.
            let words = text.text(&fed).unwrap();
            let context = words.strip_prefix("[INST] ").unwrap().split(&question.text).next().unwrap();
            let written = template.render(&user(&(context.to_string() + &question.text)), true).unwrap();
            assert_eq!("<s>".to_string() + &words, written + &question.answer_prefix, "{protocol}");
        }
    }
    let twice =
        ChatTemplate::parse("model".into(), "{{ messages[0].content * 2 }}".into(), String::new(), String::new());
    assert!(Frame::chat(&twice, &text).unwrap_err().to_string().contains("2 times; once is needed"));
}

#[test]
fn a_prompt_is_written_in_the_template_where_chat_is_asked_for() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = folder(temporary.path(), &json!({}));
    let run = |more: &[&str]| {
        let mut command = Command::cargo_bin("kvsieve").unwrap();
        command.current_dir(&folder).args(more).args(["--model", "."]).output().unwrap()
    };
    let generate = |more: &[&str]| {
        let base = ["generate", "--prompt", "Hello", "--max-new-tokens", "1", "--json", "-"];
        run(&[&base[..], more].concat())
    };
    let eval = [
        "eval",
        "--chat",
        "--task",
        "passkey",
        "--context",
        "700",
        "--samples",
        "1",
        "--policy",
        "full",
        "--json",
        "-",
    ];
    for refused in [generate(&["--chat"]), run(&eval)] {
        let said = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(2), "{said}");
        assert!(said.contains("no chat template") && said.lines().count() == 1, "{said}");
    }
    configure(&folder, &json!({ "chat_template": "<s>User: {{ messages[0].content }}</s>" }));
    let tokens = |output: std::process::Output| -> u64 {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!((tokens(generate(&[])), tokens(generate(&["--chat"]))), (1 + 5, 1 + 6 + 5 + 1));
    configure(
        &folder,
        &json!({ "chat_template": "{% for part in messages[0].content.parts %}{{ part }}{% endfor %}Bot:" }),
    );
    let said = String::from_utf8(generate(&["--chat"]).stderr).unwrap();
    assert!(said.contains("its chat template does not write what a user says"), "{said}");
    configure(&folder, &json!({ "chat_template": "<s>User: {{ messages[0].content }}</s>" }));
    let asked = run(&eval);
    let record: Value = serde_json::from_slice(asked.stdout.split(|&byte| byte == b'\n').next().unwrap()).unwrap();
    assert_eq!((&record["status"], &record["cell"]["chat"]), (&json!("ok"), &json!(true)), "{record}");
}
