//! Fuzzes the decoders of `format::record`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::record(bytes));
