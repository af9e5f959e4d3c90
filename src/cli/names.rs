//! Several names with parameters in one option, as `--policy full,snapkv:window=8,kernel=5`.

/// Names with parameters, separated by commas.
#[derive(Debug, Clone)]
pub struct Names(pub Vec<String>);

/// Splits `a:x=1,y=2,b` into `a:x=1,y=2` and `b`: what holds an equals sign but no colon before it belongs to the name in
/// front of it.
///
/// # Errors
/// When a name is empty.
pub fn named(text: &str) -> Result<Names, String> {
    let mut names: Vec<String> = Vec::new();
    for piece in text.split(',').map(str::trim) {
        let is_parameter = piece.split('+').next().is_some_and(|first| first.contains('=') && !first.contains(':'));
        match names.last_mut().filter(|_| is_parameter) {
            Some(last) => *last += &format!(",{piece}"),
            None if piece.is_empty() => return Err("a name is empty; separate names by single commas".into()),
            None => names.push(piece.into()),
        }
    }
    Ok(Names(names))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_separate_names_and_parameters() {
        for (text, expected) in [
            ("snapkv", vec!["snapkv"]),
            ("snapkv:window=64,kernel=5,h2o", vec!["snapkv:window=64,kernel=5", "h2o"]),
            ("snapkv+ada:floor=0.2,h2o+every:steps=2", vec!["snapkv+ada:floor=0.2", "h2o+every:steps=2"]),
            ("a:x=1,y=2+b:z=3,c", vec!["a:x=1,y=2+b:z=3", "c"]),
        ] {
            assert_eq!(named(text).unwrap().0, expected);
        }
        assert!(named("a,,b").is_err() && named("").is_err());
    }
}
