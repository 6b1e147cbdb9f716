//! The negotiation with the kernel before the first request.

use crate::abi::{
    self, InitIn, InitOut, MAJOR, MINOR, MINOR_CACHED, MINOR_FORGETS, MINOR_MIN, OutHeader, init, opcode,
};
use crate::error::Error;
use zerocopy::IntoBytes;

/// Flags used if the kernel offers them, with or without caches. `FUSE_ATOMIC_O_TRUNC` is not among them: with it the
/// gateway would truncate a file before the kernel checks whether the file is being executed.
const WANTED: u64 = init::ASYNC_READ
    | init::POSIX_LOCKS
    | init::EXPORT
    | init::BIG_WRITES
    | init::FLOCK_LOCKS
    | init::PARALLEL_LOOKUPS
    | init::HANDLE_KILLPRIV
    | init::MAX_PAGES
    | init::EXTENDED;
/// Flags used if the kernel caches data until it is told to drop it.
const WANTED_CACHED: u64 = WANTED | init::EXPLICIT_INVALIDATE_DATA | init::HANDLE_KILLPRIV_V2;
/// Flags used if the kernel caches only pages of mappings.
const WANTED_DIRECT: u64 = WANTED | init::INVALIDATE_DATA | init::DIRECT_IO_MMAP;
/// Limit of the kernel's own pending requests (write-back of mapped pages, read-ahead).
const BACKGROUND_MAX: u16 = 64;

/// The result of the negotiation.
pub(crate) struct Agreed {
    /// Files can be mapped shared.
    pub(crate) maps_shared: bool,
    /// The kernel caches data under leases.
    pub(crate) caches: bool,
    /// The kernel forgets inodes when asked.
    pub(crate) forgets: bool,
}

/// Answers the kernel's first message; returns the bytes to be sent, and the result.
///
/// # Errors
/// `System`: it is no such message; then there is no answer.
pub(crate) fn agree(
    message: &[u8],
    message_bytes_max: u32,
    may_cache: bool,
) -> Result<(Vec<u8>, Result<Agreed, Error>), Error> {
    let garbled = |_| Error::System { call: "read", path: "/dev/fuse".into(), errno: libc::EPROTO };
    let (header, mut body) = abi::split(message).map_err(garbled)?;
    let offer: InitIn = body.take().map_err(garbled)?;
    let answer = |error: i32, body: &[u8]| {
        let bytes = (size_of::<OutHeader>() + body.len()) as u32;
        [OutHeader { bytes, error, unique: header.unique }.as_bytes(), body].concat()
    };
    if header.opcode != opcode::INIT || offer.major != MAJOR || offer.minor < MINOR_MIN {
        let refused = Error::Protocol { major: offer.major, minor: offer.minor };
        return Ok((answer(-libc::EPROTO, &[]), Err(refused)));
    }
    let mut offered = u64::from(offer.flags);
    if offered & init::EXTENDED != 0 {
        offered |= u64::from(body.take::<u32>().map_err(garbled)?) << 32;
    }
    let caches = may_cache && offer.minor >= MINOR_CACHED;
    let flags = offered & if caches { WANTED_CACHED } else { WANTED_DIRECT };
    let fields = InitOut {
        major: MAJOR,
        minor: MINOR.min(offer.minor),
        readahead_bytes_max: offer.readahead_bytes_max,
        flags: flags as u32,
        background_max: BACKGROUND_MAX,
        congestion_threshold: BACKGROUND_MAX / 4 * 3,
        write_bytes_max: message_bytes_max,
        time_granularity_ns: 1,
        pages_max: (message_bytes_max as usize / rustix::param::page_size()) as u16,
        flags_high: (flags >> 32) as u32,
        ..InitOut::default()
    };
    let maps_shared = caches || flags & init::DIRECT_IO_MMAP != 0;
    Ok((
        answer(0, fields.as_bytes()),
        Ok(Agreed { maps_shared, caches, forgets: offer.minor >= MINOR_FORGETS }),
    ))
}
