//! The record that a program writes for the next one: its descriptors in the mount, with what the mount needs to go on
//! with them.

const MAGIC: &[u8; 8] = b"HEARTHFD";
/// Limit of bytes of a record: 65,536 descriptors with long tokens.
pub const BYTES_MAX: usize = 64 << 20;

/// A decoded record.
#[derive(Debug, PartialEq, Eq)]
pub struct ExecRecord {
    /// The token of the mount.
    pub handover: Vec<u8>,
    /// Descriptors that the files need, and that are closed when all files are taken over.
    pub passed: Vec<i32>,
    /// For each description, its numbers and its token.
    pub files: Vec<(Vec<i32>, Vec<u8>)>,
}

impl ExecRecord {
    /// The record as bytes, for the program that `process` executes next.
    pub fn encode(&self, process: i32) -> Vec<u8> {
        let mut record = MAGIC.to_vec();
        record.extend_from_slice(&process.to_le_bytes());
        put_bytes(&mut record, &self.handover);
        put_numbers(&mut record, &self.passed);
        for (numbers, token) in &self.files {
            put_numbers(&mut record, numbers);
            put_bytes(&mut record, token);
        }
        record
    }

    /// Decodes a record; `None` if the bytes are no record, or one for another process.
    pub fn decode(record: &[u8], process: i32) -> Option<Self> {
        let mut rest = record.strip_prefix(MAGIC)?;
        if take_word(&mut rest)? != process.cast_unsigned() {
            return None;
        }
        let (handover, passed) = (take_bytes(&mut rest)?, take_numbers(&mut rest)?);
        let mut files = Vec::new();
        while !rest.is_empty() {
            files.push((take_numbers(&mut rest)?, take_bytes(&mut rest)?));
        }
        Some(Self { handover, passed, files })
    }
}

fn put_bytes(record: &mut Vec<u8>, bytes: &[u8]) {
    record.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    record.extend_from_slice(bytes);
}

fn put_numbers(record: &mut Vec<u8>, numbers: &[i32]) {
    record.extend_from_slice(&(numbers.len() as u32).to_le_bytes());
    numbers.iter().for_each(|fd| record.extend_from_slice(&fd.to_le_bytes()));
}

fn take_word(rest: &mut &[u8]) -> Option<u32> {
    let (head, tail) = rest.split_first_chunk::<4>()?;
    *rest = tail;
    Some(u32::from_le_bytes(*head))
}

fn take_bytes(rest: &mut &[u8]) -> Option<Vec<u8>> {
    let length = take_word(rest)? as usize;
    let (bytes, tail) = rest.split_at_checked(length)?;
    *rest = tail;
    Some(bytes.to_vec())
}

fn take_numbers(rest: &mut &[u8]) -> Option<Vec<i32>> {
    let bytes = (take_word(rest)? as usize).checked_mul(4)?;
    let (numbers, tail) = rest.split_at_checked(bytes)?;
    *rest = tail;
    Some(numbers.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_others_and_garbage_are_refused() {
        let files = vec![(vec![1, 5], b"abc".to_vec())];
        let wanted = ExecRecord { handover: b"pq".to_vec(), passed: vec![900], files };
        let mut record = wanted.encode(7);
        assert_eq!(ExecRecord::decode(&record, 8), None);
        for cut in (0..record.len()).filter(|cut| *cut != 26) {
            assert_eq!(ExecRecord::decode(&record[..cut], 7), None, "cut at {cut}");
        }
        assert_eq!(ExecRecord::decode(&record, 7), Some(wanted));
        record[26..30].fill(0xff);
        assert_eq!(ExecRecord::decode(&record, 7), None);
    }
}
