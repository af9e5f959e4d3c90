//! GPU probe
