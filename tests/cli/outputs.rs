//! Outputs that would take the place of what is read: refused before anything is done, and every file stays as it was.

use assert_cmd::Command;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Every file of some folders with its bytes.
fn files(folders: &[&Path]) -> BTreeMap<PathBuf, Vec<u8>> {
    let paths = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path());
    paths.filter(|path| path.is_file()).map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

#[test]
fn no_output_takes_the_place_of_what_is_read() {
    let folder = tempfile::tempdir().unwrap();
    // The built-in model is first looked for in the working folder.
    let model = folder.path().join("models/builtin");
    fs::create_dir_all(&model).unwrap();
    for entry in fs::read_dir("models/builtin").unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
        }
    }
    fs::write(folder.path().join("text"), "a text").unwrap();
    fs::write(folder.path().join("trace"), "[]").unwrap();
    let before = files(&[folder.path(), &model]);
    let of_model = "a file of --model; name another";
    for (arguments, output, said) in [
        ("plan --model builtin --gpu l4 --json", "models/builtin/config.json", of_model),
        ("plan --model models/builtin --gpu l4 --json", "models/builtin/model.safetensors", of_model),
        ("plan --model models/builtin/config.json --gpu l4 --json", "models/builtin/config.json", "the same file as"),
        ("plan max-context --model builtin --gpu l4 --json", "models/builtin/config.json", of_model),
        ("plan max-batch --model builtin --gpu l4 --json", "models/builtin/config.json", of_model),
        ("plan compare builtin llama-3-8b --gpu l4 --json", "models/builtin/config.json", "a file of a model"),
        ("plan explain kv --model builtin --json", "models/builtin/config.json", of_model),
        ("plan gpus --model builtin --json", "models/builtin/config.json", of_model),
        ("plan train --model builtin --gpu l4 --json", "models/builtin/config.json", of_model),
        ("plan scale --model builtin --gpu l4 --json", "models/builtin/config.json", of_model),
        ("plan measure --model builtin --context 64 --json", "models/builtin/config.json", of_model),
        ("plan allocator trace --json", "trace", "the same file as the timeline"),
        ("inspect --output anatomy --json", "models/builtin/tokenizer.json", of_model),
        ("generate --model builtin --prompt a --json", "models/builtin/config.json", of_model),
        ("logits --model builtin --tokens text --output", "models/builtin/model.safetensors", of_model),
        ("capture --model builtin --text text --output", "models/builtin/model.safetensors", of_model),
        (
            "calibrate --model builtin --text text --method qfilters --output",
            "models/builtin/model.safetensors",
            of_model,
        ),
        ("memory write --model builtin --maps trace --input text --output", "models/builtin/config.json", of_model),
    ] {
        let mut command = Command::cargo_bin("kvsieve").unwrap();
        command.current_dir(folder.path()).args(arguments.split_whitespace()).arg(output);
        let error = String::from_utf8(command.assert().code(2).get_output().stderr.clone()).unwrap();
        assert!(error.contains(said) && error.lines().count() == 1, "{arguments}: {error}");
        assert!(files(&[folder.path(), &model]) == before, "{arguments}");
    }
}
