//! Notifications to the kernel: which of its pages, attributes and names are no longer valid. A notification waits for
//! locks of the kernel, for example of pages, which a request that is being served may hold. So threads that serve
//! requests send none.

use crate::abi::{ForgetOut, InvalidateInodeOut, OutHeader, StoreOut, notice};
use format::InodeNumber;
use zerocopy::IntoBytes;

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
