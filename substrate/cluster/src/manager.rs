//! The seam: what the rest of Hearth sees of the cluster manager, whatever stands behind it (Assise §3.1).

use crate::change::{Change, Done, Party, Record};
use crate::error::Error;
use crate::view::View;
use format::{BeatVersion, ChangeNumber};
use ipc::Time;
use std::sync::Arc;

/// A cluster manager. Every call ends at `until`, on the clock of the caller's host; `watch` and `history`, whose answer
/// has to come even to somebody who does not want to wait, may take two seconds more.
///
/// Whoever has seen a view, or the answer to a change, sees nothing older from the same manager afterwards, and a
/// change that was answered is never lost. It is not on the path of any IO.
pub trait Manager: Send + Sync {
    /// The view, once it is newer than `after`; the present one when `until` has come.
    ///
    /// # Errors
    /// `Unreachable`, `Failed`, `OtherCluster`, `Message`.
    fn watch(&self, after: ChangeNumber, until: Time) -> Result<Arc<View>, Error>;

    /// Makes a change, all of it or nothing, and answers when it is durable.
    ///
    /// # Errors
    /// `Refused`, `Unknown`, and those of [`Self::watch`].
    fn propose(&self, change: &Change, until: Time) -> Result<Done, Error>;

    /// Writes a member's heartbeat. It counts from before the call, and only if this succeeds.
    ///
    /// # Errors
    /// `Refused` (`NotMember`, `HeartbeatRefused`), and those of [`Self::propose`].
    fn beat(&self, party: Party, until: Time) -> Result<BeatVersion, Error>;

    /// Which heartbeat a member has now: what an expulsion is conditional on.
    ///
    /// # Errors
    /// `Refused` (`NotMember`), and those of [`Self::watch`].
    fn beat_of(&self, party: Party, until: Time) -> Result<BeatVersion, Error>;

    /// Changes that were made, oldest first, from this number on, and how they were made. The oldest may be gone.
    ///
    /// # Errors
    /// Those of [`Self::watch`].
    fn history(&self, from: ChangeNumber, count: u32, until: Time) -> Result<Vec<Record>, Error>;
}
