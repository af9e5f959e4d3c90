//! Tokenizers of GGUF files: the tokens of the library that they come from, and the way from a folder to a file.

use crate::common::gguf::{F32, Parts};
use crate::common::models::checkpoint;
use assert_cmd::Command;
use kvsieve::model::Text;
use serde_json::{Value, json};
use std::path::Path;

/// A file with a tokenizer of these keys, and with those that have a dot in them.
fn file(folder: &Path, keys: &[(&str, Value)]) -> Text {
    let mut parts = Parts::of(&checkpoint("llama").folder, F32);
    let whole = |key: &str| if key.contains('.') { key.into() } else { format!("tokenizer.ggml.{key}") };
    parts.keys.extend(keys.iter().map(|(key, value)| (whole(key), value.clone())));
    let path = folder.join("model.gguf");
    std::fs::write(&path, parts.bytes()).unwrap();
    Text::open(&path).unwrap()
}

/// What SentencePiece says of a tokenizer that it trained (tests/conformance/sentencepiece_fixtures.py).
fn sentencepiece() -> Value {
    serde_json::from_slice(&std::fs::read("tests/fixtures/sentencepiece.json").unwrap()).unwrap()
}

/// Keys of a file, without what they all begin with.
type Keys = Vec<(&'static str, Value)>;

fn keys(fixture: &Value) -> Keys {
    vec![
        ("model", json!("llama")),
        ("tokens", fixture["tokens"].clone()),
        ("scores", fixture["scores"].clone()),
        ("token_type", fixture["kinds"].clone()),
    ]
}

fn cases(fixture: &Value, name: &str) -> Vec<(String, Vec<u32>)> {
    serde_json::from_value(fixture[name].clone()).unwrap()
}

#[test]
fn tokens_are_those_of_sentencepiece() {
    let (fixture, folder) = (sentencepiece(), tempfile::tempdir().unwrap());
    for (name, space) in [("cases", None), ("cases_without_space", Some(false))] {
        let space = space.map(|space: bool| ("add_space_prefix", json!(space)));
        let text = file(folder.path(), &[keys(&fixture), space.into_iter().collect()].concat());
        for (case, tokens) in cases(&fixture, name) {
            assert_eq!(text.rendered(&case).unwrap(), tokens, "{name}: {case:?}");
            // A text begins with token 1 where the file does not say otherwise.
            assert_eq!(text.tokens(&case).unwrap(), [&[1], &tokens[..]].concat());
            // A space in the place of its letter is the one thing that does not come back.
            assert_eq!(text.text(&tokens).unwrap(), case.replace('\u{2581}', " "), "{name}");
        }
    }
    let text = file(folder.path(), &[keys(&fixture), vec![("add_bos_token", json!(false))]].concat());
    assert!(text.beginning().unwrap().is_empty());
    let marked = vec![("add_bos_token", json!(false)), ("add_eos_token", json!(true)), ("eos_token_id", json!(2))];
    let text = file(folder.path(), &[keys(&fixture), marked].concat());
    assert_eq!(text.tokens("a").unwrap().last(), Some(&2));
}

#[test]
fn a_piece_of_a_text_gets_no_space_that_is_not_in_it() {
    let (fixture, folder) = (sentencepiece(), tempfile::tempdir().unwrap());
    let text = file(folder.path(), &keys(&fixture));
    for (case, tokens) in cases(&fixture, "cases_without_space") {
        assert_eq!(text.piece(&case).unwrap(), tokens, "{case:?}");
    }
    // Pieces one after the other are the text.
    let [first, second] = ["the key", " of the red door"].map(|piece| text.piece(piece).unwrap());
    assert_eq!(text.text(&[first.clone(), second].concat()).unwrap(), "the key of the red door");
    assert_eq!(text.beginning().unwrap(), [1]);
    // The other ways in which a tokenizer.json asks for one.
    let made = |pre_tokenizer: Value| {
        let letters = ["a", "b", "\u{2581}", "\u{120}"];
        let vocabulary: serde_json::Map<String, Value> =
            letters.iter().enumerate().map(|(id, letter)| ((*letter).to_owned(), json!(id))).collect();
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": pre_tokenizer,
            "post_processor": null, "decoder": null,
            "model": { "type": "BPE", "vocab": vocabulary, "merges": [] },
        });
        Text::parse("tokenizer.json".into(), &tokenizer.to_string()).unwrap()
    };
    let metaspace = |scheme: &str| json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false });
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    for (pre_tokenizer, space) in [
        (metaspace("first"), 2),
        (metaspace("always"), 2),
        (json!({ "type": "Sequence", "pretokenizers": [metaspace("always")] }), 2),
        (bytes, 3),
    ] {
        let text = made(pre_tokenizer);
        assert_eq!(text.tokens("ab").unwrap(), [space, 0, 1]);
        assert_eq!(text.piece("ab").unwrap(), [0, 1]);
        assert_eq!(text.piece(" a").unwrap(), [space, 0]);
    }
    let text = made(metaspace("never"));
    assert_eq!(text.tokens("ab").unwrap(), text.piece("ab").unwrap());
}

#[test]
fn a_folder_with_a_tokenizer_of_sentencepiece_becomes_a_file_with_the_same() {
    let (fixture, folder) = (sentencepiece(), tempfile::tempdir().unwrap());
    let tokens: Vec<&str> = fixture["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    let vocabulary: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
    let added = |id: usize, special: bool| {
        json!({ "id": id, "content": tokens[id], "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special })
    };
    for (name, space) in [("cases", true), ("cases_without_space", false)] {
        let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" });
        let prepend = space.then(|| json!({ "type": "Prepend", "prepend": "\u{2581}" }));
        // As transformers writes that of Llama 2.
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": [added(0, true), added(1, true), added(2, true), added(3, false)],
            "normalizer": {
                "type": "Sequence", "normalizers": prepend.into_iter().chain([replace]).collect::<Vec<_>>(),
            },
            "pre_tokenizer": null,
            "post_processor": null,
            "decoder": { "type": "ByteFallback" },
            "model": {
                "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocabulary, "merges": fixture["merges"],
            },
        });
        for part in ["config.json", "model.safetensors"] {
            std::fs::copy(Path::new("models/builtin").join(part), folder.path().join(part)).unwrap();
        }
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let path = folder.path().join("model.gguf");
        let arguments = ["quantize", "--format", "q8_0", "--threads", "2", "--model"];
        let quantize = |path: &Path| {
            let mut command = Command::cargo_bin("kvsieve").unwrap();
            command.args(arguments).arg(folder.path()).arg("--output").arg(path).assert()
        };
        quantize(&path).success();
        let text = Text::open(&path).unwrap();
        for (case, tokens) in cases(&fixture, name) {
            assert_eq!(text.tokens(&case).unwrap(), tokens, "{name}: {case:?}");
        }
        // A mark that takes spaces along is no token of a file, which says nothing of it.
        let mut takes = tokenizer;
        takes["added_tokens"][2]["rstrip"] = true.into();
        std::fs::write(folder.path().join("tokenizer.json"), takes.to_string()).unwrap();
        let said = quantize(&folder.path().join("other.gguf")).code(2).get_output().stderr.clone();
        assert!(String::from_utf8(said).unwrap().contains("take spaces along"));
    }
}

/// A Phi 3's marks take the spaces behind them along, but for those that begin and end texts; of the others only a name says it.
#[test]
fn marks_of_a_phi_3_take_spaces_along() {
    let (fixture, folder) = (sentencepiece(), tempfile::tempdir().unwrap());
    let of = |name: &str| file(folder.path(), &[keys(&fixture), vec![("general.name", json!(name))]].concat());
    let [apart, together] = ["a</s> \n b", "a</s>b"];
    let (phi, other) = (of("Phi 3 or phi3 mini"), of("Llama"));
    assert_eq!(phi.tokens(apart).unwrap(), phi.tokens(together).unwrap());
    assert_ne!(other.tokens(apart).unwrap(), other.tokens(together).unwrap());
    // Whatever kind of an added token it is.
    let own = fixture["tokens"][3].as_str().unwrap();
    let [apart, together] = [format!("a{own}  b"), format!("a{own}b")];
    assert_eq!(phi.tokens(&apart).unwrap(), phi.tokens(&together).unwrap());
    assert_ne!(other.tokens(&apart).unwrap(), other.tokens(&together).unwrap());
    assert_ne!(phi.tokens("a<s> b").unwrap(), phi.tokens("a<s>b").unwrap());
    // What is not known has a token of its own, which texts may hold.
    let unknown = other.tokens("<unk>").unwrap();
    assert!(unknown.contains(&0) && unknown.len() <= 2, "{unknown:?}");
}

#[test]
fn text_is_cut_in_the_way_that_a_file_names() {
    let folder = tempfile::tempdir().unwrap();
    // Bytes, then tokens that only come about where a text is not cut inside them.
    let letters = "abcdefghijklmnopqrstuvwxyzBW0123456789'!/\u{10a}\u{120}";
    let mut tokens: Vec<String> = letters.chars().map(String::from).collect();
    let merges = ["o W", "1 2", "12 3", "! /"];
    tokens.extend(merges.map(|merge| merge.replace(' ', "")));
    tokens.push("<begin>".into());
    let begin = tokens.len() as u32 - 1;
    let mut kinds = vec![1; tokens.len()];
    kinds[begin as usize] = 3;
    let of = |pre: &str| {
        let keys = [
            ("model", json!("gpt2")),
            ("pre", json!(pre)),
            ("tokens", json!(tokens)),
            ("token_type", json!(kinds)),
            ("merges", json!(merges)),
            ("bos_token_id", json!(begin)),
        ];
        file(folder.path(), &keys)
    };
    // A capital inside a word, three digits, two marks of which one is a slash; whether a text begins with a token.
    for (pre, tokens, begins) in [
        ("gpt-2", [9, 1, 1], false),
        ("phi-2", [9, 1, 1], false),
        ("smollm", [9, 3, 1], false),
        ("starcoder", [9, 3, 1], false),
        ("llama-bpe", [9, 1, 1], true),
        ("llama-v3", [9, 1, 1], true),
        ("dbrx", [9, 1, 1], false),
        ("qwen2", [9, 3, 1], false),
        ("deepseek-r1-qwen", [9, 3, 1], false),
        ("tekken", [10, 3, 1], true),
        ("gpt-4o", [10, 1, 1], false),
    ] {
        let text = of(pre);
        let counted = ["helloWorld", "123", "!/"].map(|case| text.piece(case).unwrap().len());
        assert_eq!(counted, tokens, "{pre}");
        assert_eq!(text.beginning().unwrap(), if begins { vec![begin] } else { vec![] }, "{pre}");
        assert_eq!(text.text(&text.tokens("helloWorld 123!/\nit's").unwrap()).unwrap(), "helloWorld 123!/\nit's");
    }
}

#[test]
fn what_is_wrong_with_a_tokenizer_is_said_in_one_line() {
    let (fixture, folder) = (sentencepiece(), tempfile::tempdir().unwrap());
    let said = |change: &dyn Fn(&mut Keys)| {
        let mut keys = keys(&fixture);
        change(&mut keys);
        let mut parts = Parts::of(&checkpoint("llama").folder, F32);
        parts.keys.extend(keys.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)));
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, parts.bytes()).unwrap();
        Text::open(&path).err().expect("it is refused").to_string()
    };
    type Change<'a> = &'a dyn Fn(&mut Keys);
    let cases: [(Change<'_>, &str); 6] = [
        (&|keys| keys[0].1 = json!("bert"), "its tokenizer is 'bert'; read are gpt2"),
        (&|keys| drop(keys.remove(2)), "it has no list tokenizer.ggml.scores"),
        (&|keys| keys[2].1 = json!([0.5, 1.5]), "tokenizer.ggml.scores has not one number for each token"),
        (&|keys| keys[3].1 = json!([1, 1]), "tokenizer.ggml.token_type has not one element for each token"),
        (&|keys| keys.push(("unknown_token_id", json!(9999))), "tokenizer.ggml.unknown_token_id is no token"),
        (
            &|keys| {
                keys[0].1 = json!("gpt2");
                keys.push(("pre", json!("bloom")));
            },
            "its text is cut as 'bloom'; known: gpt-2",
        ),
    ];
    for (change, expected) in cases {
        let said = said(change);
        assert!(said.contains(expected) && said.lines().count() == 1, "{said}");
    }
}

/// What stands before every text is no answer to one that is not empty.
#[test]
fn a_text_of_which_the_vocabulary_has_nothing_is_refused() {
    let path = Path::new("models/builtin/tokenizer.json");
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let whole = Text::parse(path.into(), &json.to_string()).unwrap();
    assert_eq!(whole.tokens("").unwrap(), [0]);
    // One that marks a beginning is of the text where it is written in it.
    assert_eq!(whole.tokens("<|begin|>").unwrap(), [0, 0]);
    json["model"]["vocab"] = json!({});
    let empty = Text::parse(path.into(), &json.to_string()).unwrap();
    let said = empty.tokens("a bear saw the sea").unwrap_err().to_string();
    assert!(said.contains("the vocabulary has no token for anything in the text"), "{said}");
}
