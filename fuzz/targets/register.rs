//! Fuzzes the decoders of `format::register`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::register(bytes));
