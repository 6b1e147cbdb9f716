//! Fuzzes the decoders of `format::identity`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::identity(bytes));
