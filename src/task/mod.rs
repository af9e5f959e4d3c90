//! Tasks that need no download: what they are made of.

pub mod text;
