//! Fuzzes the decoders of `format::share`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::share(bytes));
