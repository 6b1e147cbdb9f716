//! Fuzzes the decoders of `format::locks`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::locks(bytes));
