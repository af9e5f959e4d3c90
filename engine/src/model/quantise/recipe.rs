//! How the codes of a folder are chosen, as it is written: `gptq:group=64,symmetric=false`.

use super::gptq::Gptq;
use crate::format::Grid;
use crate::named::{Named, NamedError, Parameter};
use std::fmt;
use std::str::FromStr;

/// How codes are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Method {
    /// Each the nearest.
    Nearest,
    Gptq(Gptq),
    Awq,
}

/// How a folder's matrices are coded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recipe {
    pub(super) method: Method,
    pub(super) grid: Grid,
}

const GROUP: Parameter =
    Parameter { name: "group", default: "128", about: "inputs that share a scale, a multiple of 32" };
const SYMMETRIC: Parameter =
    Parameter { name: "symmetric", default: "true", about: "whether zero is the middle of the codes" };

/// Names, and what each may be asked for.
const METHODS: [(&str, &[Parameter]); 4] = [
    ("int4", &[GROUP, SYMMETRIC]),
    ("int8", &[GROUP, SYMMETRIC]),
    (
        "gptq",
        &[
            GROUP,
            SYMMETRIC,
            Parameter { name: "bits", default: "4", about: "of a code: 4 or 8" },
            Parameter {
                name: "order",
                default: "inputs",
                about: "in which columns come: inputs, or act, by their size",
            },
            Parameter { name: "damp", default: "0.01", about: "part of the inputs' mean square that is added to each" },
        ],
    ),
    ("awq", &[GROUP]),
];

impl Recipe {
    /// The names of all.
    pub fn names() -> [&'static str; 4] {
        METHODS.map(|(name, _)| name)
    }

    /// Whether codes are chosen by a text.
    pub fn reads_text(&self) -> bool {
        self.method != Method::Nearest
    }

    /// Whether weights are packed as AWQ packs them, or as GPTQ does.
    pub(super) fn is_awq(&self) -> bool {
        self.method == Method::Awq
    }
}

impl FromStr for Recipe {
    type Err = NamedError;

    fn from_str(text: &str) -> Result<Self, NamedError> {
        let named: Named = text.parse()?;
        let (name, known) = *named.find("format", &METHODS, |(name, _)| name)?;
        named.check(known)?;
        let group = named.count("group", 128, 32)?;
        if !group.is_multiple_of(32) {
            return Err(named.wrong("group", "a multiple of 32".into()));
        }
        let bits = match (name, named.count("bits", 4, 4)?) {
            ("int8", _) => 8,
            (_, bits @ (4 | 8)) => bits as u32,
            _ => return Err(named.wrong("bits", "4 or 8".into())),
        };
        let by_size = match named.text("order").unwrap_or("inputs") {
            "inputs" => false,
            "act" => true,
            _ => return Err(named.wrong("order", "inputs or act".into())),
        };
        let method = match name {
            "gptq" => Method::Gptq(Gptq { by_size, damp: named.number("damp", 0.01, 1e-6..=1.0)? }),
            "awq" => Method::Awq,
            _ => Method::Nearest,
        };
        let symmetric = name != "awq" && named.flag("symmetric", true)?;
        let least_zero = u8::from(name != "awq");
        Ok(Recipe { method, grid: Grid { bits, group, symmetric, least_zero } })
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Grid { bits, group, symmetric, .. } = self.grid;
        match self.method {
            Method::Nearest => write!(formatter, "int{bits}:group={group},symmetric={symmetric}"),
            Method::Gptq(Gptq { by_size, damp }) => {
                let order = if by_size { "act" } else { "inputs" };
                write!(formatter, "gptq:bits={bits},damp={damp},group={group},order={order},symmetric={symmetric}")
            }
            Method::Awq => write!(formatter, "awq:group={group}"),
        }
    }
}
