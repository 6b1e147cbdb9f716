//! What is told to the kernel without having been asked: which of its pages, attributes and names are not good any more.
//! A notice waits for locks of the kernel (those of pages, for one, which a request that is being served may hold), so none is
//! sent by a thread that serves requests.

use crate::abi::{ForgetOut, InvalidateInodeOut, OutHeader, StoreOut, notice};
use format::InodeNumber;
use zerocopy::IntoBytes;

/// Sends bytes to the kernel; its errno if it does not take them.
pub(crate) type SendNotice = Box<dyn Fn(&[u8]) -> Result<(), i32> + Send + Sync>;

/// The way to the kernel for notices.
pub(crate) struct Notices {
    send: SendNotice,
}

impl Notices {
    pub(crate) fn new(send: SendNotice) -> Self {
        Self { send }
    }

    fn send(&self, code: u32, parts: &[&[u8]]) -> Result<(), i32> {
        let bytes = size_of::<OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
        // A message that answers nothing has a code where others have an error.
        let header = OutHeader { bytes: bytes as u32, error: code as i32, unique: 0 };
        let mut message = Vec::with_capacity(bytes);
        message.extend_from_slice(header.as_bytes());
        parts.iter().for_each(|part| message.extend_from_slice(part));
        (self.send)(&message)
    }

    /// Drops attributes of a node and its pages from an offset on, for so many bytes (0: to the end). What is dirty is
    /// written back first, by requests that are served meanwhile.
    ///
    /// # Errors
    /// The errno: ENOENT if the kernel has no such inode.
    pub(crate) fn drop_pages(&self, node: u64, offset: u64, bytes: u64) -> Result<(), i32> {
        let fields = InvalidateInodeOut { node, offset: offset as i64, bytes: bytes as i64 };
        self.send(notice::INVALIDATE_INODE, &[fields.as_bytes()])
    }

    /// Drops attributes of a node, not its pages.
    ///
    /// # Errors
    /// As [`Self::drop_pages`].
    pub(crate) fn drop_attributes(&self, node: u64) -> Result<(), i32> {
        let fields = InvalidateInodeOut { node, offset: -1, bytes: 0 };
        self.send(notice::INVALIDATE_INODE, &[fields.as_bytes()])
    }

    /// Makes every name that the kernel keeps one that it asks for again.
    ///
    /// # Errors
    /// The errno.
    pub(crate) fn drop_names(&self) -> Result<(), i32> {
        self.send(notice::RAISE_EPOCH, &[])
    }

    /// Asks for inodes to be forgotten that no program uses; of each that is, a FORGET comes.
    ///
    /// # Errors
    /// The errno.
    pub(crate) fn forget(&self, nodes: &[InodeNumber]) -> Result<(), i32> {
        let fields = ForgetOut { count: nodes.len() as u32, ..ForgetOut::default() };
        let numbers: Vec<u64> = nodes.iter().map(|node| node.get()).collect();
        self.send(notice::FORGET, &[fields.as_bytes(), numbers.as_bytes()])
    }

    /// Puts bytes into a node's pages; a file that ends before them ends behind them then, as the kernel sees it.
    ///
    /// # Errors
    /// As [`Self::drop_pages`].
    pub(crate) fn store(&self, node: u64, offset: u64, bytes: &[u8]) -> Result<(), i32> {
        let fields = StoreOut { node, offset, bytes: bytes.len() as u32, unused: 0 };
        self.send(notice::STORE, &[fields.as_bytes(), bytes])
    }
}
