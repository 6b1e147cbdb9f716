//! Fuzzes the decoders of `format::wire`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::wire(bytes));
