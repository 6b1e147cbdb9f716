//! Fuzzes the decoders of `format::call`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::call(bytes));
