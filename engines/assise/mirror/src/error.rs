//! The error type of this crate.

use format::DecodeError;
use format::mirror::MirrorRefusal;
use pmem::MediaError;

/// The reason for which a head cannot send to a copy, or a copy does not accept a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The connection has ended or failed.
    Connection(transport::Error),
    /// The medium failed.
    Media(MediaError),
    /// Bytes that are not a message.
    Message(DecodeError),
    /// A message that violates the protocol, in this way.
    Broken(&'static str),
    /// The copy refuses this head.
    Refused(MirrorRefusal),
    /// The head's tree could not be taken in; why.
    Import(String),
    /// The copy has no room for its former tree and that of the head together.
    ImportRoom,
    /// The copy had no such room, and has given up its former tree.
    TreeGivenUp,
    /// The copy has no such room, and could not give up its former tree; why.
    TreeKept(String),
    /// The copy has no room for the tree of the head, although its pool holds nothing else.
    PoolRoom,
    /// The copy's tree could not be read; why.
    Tree(String),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Connection(error) => write!(f, "{error}"),
            Self::Media(error) => write!(f, "medium: {error}"),
            Self::Message(error) => write!(f, "message refused: {error}"),
            Self::Broken(what) => write!(f, "out of turn: {what}"),
            Self::Import(why) => write!(f, "the tree of the head could not be taken in: {why}"),
            Self::ImportRoom => {
                f.write_str("the copy has no room for its former tree and that of the head together")
            }
            Self::TreeGivenUp => f.write_str(
                "the copy had no room for its former tree and that of the head together: it gave up its own, and gets that of the head",
            ),
            Self::TreeKept(why) => {
                write!(f, "{}, and it cannot give up its own: {why}", Self::ImportRoom)
            }
            Self::PoolRoom => f.write_str(
                "the pool of the copy has no room for the tree of the head, although it holds nothing else: remove files at the node that \
                 leads",
            ),
            Self::Tree(why) => write!(f, "the tree of the copy could not be read: {why}"),
            Self::Refused(refusal) => write!(f, "refused by the copy: {}", reason_of(*refusal)),
        }
    }
}

fn reason_of(refusal: MirrorRefusal) -> &'static str {
    match refusal {
        MirrorRefusal::None => "for no reason",
        MirrorRefusal::Version => "it has heard of a later head",
        MirrorRefusal::Chain => "it is a copy of another chain",
        MirrorRefusal::Rules => "it goes by other rules",
        MirrorRefusal::Ledger => "its ledger has another length",
        MirrorRefusal::Closed => "it takes nothing",
        MirrorRefusal::Import => "it could not take in the tree",
        MirrorRefusal::Space => "its medium has no space for more",
        MirrorRefusal::Compare => "it cannot compare its tree now",
    }
}

impl std::error::Error for Error {}

impl From<transport::Error> for Error {
    fn from(error: transport::Error) -> Self {
        Self::Connection(error)
    }
}

impl From<MediaError> for Error {
    fn from(error: MediaError) -> Self {
        Self::Media(error)
    }
}

impl From<DecodeError> for Error {
    fn from(error: DecodeError) -> Self {
        Self::Message(error)
    }
}
