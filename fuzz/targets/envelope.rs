//! Fuzzes the decoders of `format::envelope`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::envelope(bytes));
