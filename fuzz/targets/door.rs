//! Fuzzes the decoders of `format::wire` that strangers reach: the door's, and that of an entry.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::door(bytes));
