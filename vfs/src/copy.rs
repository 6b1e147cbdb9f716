//! Copies from one open file to another within an engine, piece by piece.

use crate::error::Error;

/// Bytes of a piece.
const PIECE_BYTES: usize = 256 * 1024;

/// Copies `bytes` bytes, or fewer if the source ends. Both functions get the number of bytes copied so far.
///
/// # Errors
/// Those of reading and writing, if nothing was copied.
pub fn copy_pieces(
    bytes: usize,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<usize, Error>,
    mut write: impl FnMut(u64, &[u8]) -> Result<usize, Error>,
) -> Result<usize, Error> {
    let mut buffer = vec![0; bytes.min(PIECE_BYTES)];
    let mut copied = 0;
    while copied < bytes {
        let piece = buffer.len().min(bytes - copied);
        let at = copied as u64;
        let result = read(at, &mut buffer[..piece]).and_then(|read| Ok((read, write(at, &buffer[..read])?)));
        match result {
            Ok((read, written)) => {
                copied += written;
                if read < piece || written < read {
                    break;
                }
            }
            Err(error) if copied == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(copied)
}
