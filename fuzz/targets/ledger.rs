//! Fuzzes the decoders of `format::ledger`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::ledger(bytes));
