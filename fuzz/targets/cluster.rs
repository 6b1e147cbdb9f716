//! Fuzzes the decoders of `format::cluster`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::cluster(bytes));
