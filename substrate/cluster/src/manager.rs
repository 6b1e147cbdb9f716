//! The interface of the cluster manager for the rest of Hearth, for all backends (Assise §3.1).

use crate::change::{Change, Done, Party, Record};
use crate::error::Error;
use crate::view::View;
use format::{BeatVersion, ChangeNumber};
use ipc::Time;
use std::sync::Arc;

/// A cluster manager. Every call ends at `until`, on the clock of the caller's host. `watch` and `history` may take two
/// seconds more, as they need an answer even for a caller that does not want to wait.
///
/// After a caller has seen a view, or the answer to a change, the same manager never shows it anything older, and never
/// loses a change that it has answered. The manager is not on the path of any IO.
pub trait Manager: Send + Sync {
    /// The view, once it is newer than `after`; the current view when `until` has passed.
    ///
    /// # Errors
    /// `Unreachable`, `Failed`, `OtherCluster`, `Message`.
    fn watch(&self, after: ChangeNumber, until: Time) -> Result<Arc<View>, Error>;

    /// Makes a change, completely or not at all, and answers when it is durable.
    ///
    /// # Errors
    /// `Refused`, `Unknown`, and those of [`Self::watch`].
    fn propose(&self, change: &Change, until: Time) -> Result<Done, Error>;

    /// Writes a member's heartbeat. It counts from the time before the call, and only if the call succeeds.
    ///
    /// # Errors
    /// `Refused` (`NotMember`, `HeartbeatRefused`), and those of [`Self::propose`].
    fn beat(&self, party: Party, until: Time) -> Result<BeatVersion, Error>;

    /// The current heartbeat of a member, on which an expulsion is conditional.
    ///
    /// # Errors
    /// `Refused` (`NotMember`), and those of [`Self::watch`].
    fn beat_of(&self, party: Party, until: Time) -> Result<BeatVersion, Error>;

    /// The changes that were made, from this number on, oldest first. The oldest ones may be gone.
    ///
    /// # Errors
    /// Those of [`Self::watch`].
    fn history(&self, from: ChangeNumber, count: u32, until: Time) -> Result<Vec<Record>, Error>;
}
