//! Notifications to the kernel: which of its pages, attributes and names are no longer valid. A notification waits for
//! locks of the kernel, for example of pages, which a request that is being served may hold. So threads that serve
//! requests send none.

use crate::abi::OutHeader;
use format::InodeNumber;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Codes of notifications to the kernel.
pub(crate) mod notice {
    pub(crate) const INVALIDATE_INODE: u32 = 2;
    pub(crate) const INVALIDATE_NAME: u32 = 3;
    pub(crate) const STORE: u32 = 4;
    pub(crate) const RESEND: u32 = 7;
    pub(crate) const RAISE_EPOCH: u32 = 8;
    pub(crate) const FORGET: u32 = 9;
}

/// Inodes that the kernel forgets if they are unused; their numbers follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ForgetOut {
    pub(crate) count: u32,
    pub(crate) unused: [u32; 3],
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InvalidateInodeOut {
    pub(crate) node: u64,
    /// Negative: only attributes.
    pub(crate) offset: i64,
    /// Zero: up to the end.
    pub(crate) bytes: i64,
}

/// [`InvalidateNameOut::flags`]: the name is looked up again at its next use, but nothing below it is unmounted.
pub(crate) const EXPIRE_ONLY: u32 = 1 << 0;

/// The name and a zero byte follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InvalidateNameOut {
    pub(crate) directory: u64,
    /// Without the zero byte.
    pub(crate) bytes: u32,
    pub(crate) flags: u32,
}

/// Bytes follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct StoreOut {
    pub(crate) node: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: u32,
    pub(crate) unused: u32,
}

// The sizes in the kernel's header.
const _: () = assert!(size_of::<InvalidateInodeOut>() == 24 && size_of::<StoreOut>() == 24);
const _: () = assert!(size_of::<InvalidateNameOut>() == 16 && size_of::<ForgetOut>() == 16);

/// Sends bytes to the kernel; returns its errno if it refuses them.
pub(crate) type SendNotice = Box<dyn Fn(&[u8]) -> Result<(), i32> + Send + Sync>;

/// Sends notifications.
pub(crate) struct Notices {
    send: SendNotice,
}

impl Notices {
    pub(crate) fn new(send: SendNotice) -> Self {
        Self { send }
    }

    fn send(&self, code: u32, parts: &[&[u8]]) -> Result<(), i32> {
        let bytes = size_of::<OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
        // In a notification, the field for the error contains the code.
        let header = OutHeader { bytes: bytes as u32, error: code as i32, unique: 0 };
        let mut message = Vec::with_capacity(bytes);
        message.extend_from_slice(header.as_bytes());
        parts.iter().for_each(|part| message.extend_from_slice(part));
        (self.send)(&message)
    }

    /// Drops the attributes of a node, and `bytes` bytes of its pages from an offset on (0: to the end). Dirty pages
    /// are written back first, by requests that are served meanwhile.
    ///
    /// # Errors
    /// The errno: ENOENT if the kernel has no such inode.
    pub(crate) fn drop_pages(&self, node: u64, offset: u64, bytes: u64) -> Result<(), i32> {
        let fields = InvalidateInodeOut { node, offset: offset as i64, bytes: bytes as i64 };
        self.send(notice::INVALIDATE_INODE, &[fields.as_bytes()])
    }

    /// Drops the attributes of a node, but not its pages.
    ///
    /// # Errors
    /// Those of [`Self::drop_pages`].
    pub(crate) fn drop_attributes(&self, node: u64) -> Result<(), i32> {
        let fields = InvalidateInodeOut { node, offset: -1, bytes: 0 };
        self.send(notice::INVALIDATE_INODE, &[fields.as_bytes()])
    }

    /// Invalidates every name that the kernel has.
    ///
    /// # Errors
    /// The errno.
    pub(crate) fn drop_names(&self) -> Result<(), i32> {
        self.send(notice::RAISE_EPOCH, &[])
    }

    /// Makes the kernel look a name up again at its next use. It waits until no thread creates, removes or renames in
    /// the directory.
    ///
    /// # Errors
    /// The errno: ENOENT if the kernel has no such name.
    pub(crate) fn expire_name(&self, directory: u64, name: &[u8]) -> Result<(), i32> {
        let fields = InvalidateNameOut { directory, bytes: name.len() as u32, flags: EXPIRE_ONLY };
        self.send(notice::INVALIDATE_NAME, &[fields.as_bytes(), name, b"\0"])
    }

    /// Asks the kernel to forget unused inodes; it sends a FORGET for each that it forgets.
    ///
    /// # Errors
    /// The errno.
    pub(crate) fn forget(&self, nodes: &[InodeNumber]) -> Result<(), i32> {
        let fields = ForgetOut { count: nodes.len() as u32, ..ForgetOut::default() };
        let numbers: Vec<u64> = nodes.iter().map(|node| node.get()).collect();
        self.send(notice::FORGET, &[fields.as_bytes(), numbers.as_bytes()])
    }

    /// Stores bytes into a node's pages; extends the file for the kernel if they are beyond its end.
    ///
    /// # Errors
    /// Those of [`Self::drop_pages`].
    pub(crate) fn store(&self, node: u64, offset: u64, bytes: &[u8]) -> Result<(), i32> {
        let fields = StoreOut { node, offset, bytes: bytes.len() as u32, unused: 0 };
        self.send(notice::STORE, &[fields.as_bytes(), bytes])
    }
}
