//! The commands of the program `hearth`.

#![forbid(unsafe_code)]
