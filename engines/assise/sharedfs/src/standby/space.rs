//! Space of a copy: it holds as much as it has received and not executed, so that it can execute that on a full medium. Without
//! space for what a head sends it refuses the head, and leaves the in-sync set for that. It has not failed: it returns when there is
//! space.

use super::contents::Contents;
use super::{Inner, Standby};
use crate::pool_space::HoldStep;
use format::mirror::MirrorRefusal;
use ipc::sync::Ordering;
use mirror::{Receiver, SpaceFor};
use pmem::MediaError;

impl Standby {
    /// Whether the medium lacks space that the pool should hold.
    pub fn lacks_space(&self) -> bool {
        self.0.left_for_space.load(Ordering::Relaxed) != 0 || self.0.holding.lock().is_short
    }
}

impl Inner {
    /// The receiver of a pool that was opened takes only what there is space for.
    pub(super) fn watch_space(&self, contents: &Contents, receiver: &mut Receiver) {
        self.note_provided(contents);
        let (space, provided) = (self.space.clone(), self.provided.clone());
        // Relaxed, here and below: an earlier number is one of a tree before, with which more space is needed.
        let space_for: SpaceFor = Box::new(move |blocks| space.has(blocks, provided.load(Ordering::Relaxed)));
        receiver.set_space_for(space_for);
        let blocks = (receiver.unexecuted_blocks(), contents.area.provided_blocks());
        self.space.hold_at_start(blocks);
    }

    pub(super) fn note_provided(&self, contents: &Contents) {
        self.provided.store(contents.area.provided_blocks(), Ordering::Relaxed);
    }

    /// True if a head is refused because the copy left for lack of space, and there is too little still.
    pub(super) fn refuses_for_space(&self, receiver: &Receiver) -> bool {
        // Relaxed: a hint.
        if self.left_for_space.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let lacks = !receiver.has_space(self.space.blocks_to_return());
        self.left_for_space.store(lacks.into(), Ordering::Relaxed);
        lacks
    }

    /// A head sent something for which there is no space: the link ends, and the pool stays as it is.
    pub(super) fn refuse_for_space<T>(&self, taken: Result<T, mirror::Error>) -> Result<T, mirror::Error> {
        match taken {
            Err(mirror::Error::Media(MediaError::NoSpace)) => {
                self.left_for_space.store(1, Ordering::Relaxed);
                Err(mirror::Error::Refused(MirrorRefusal::Space))
            }
            taken => taken,
        }
    }

    /// Nothing is executed for lack of space: no head waits for that.
    pub(super) fn leave_for_space(&self) {
        self.left_for_space.store(1, Ordering::Relaxed);
        let link = self.head.lock().connection.take();
        if let Some(link) = link {
            link.close();
        }
    }

    /// Holds more, or gives up what is not needed any more. True if there is more to do.
    pub(super) fn hold_step(&self, is_idle: bool) -> bool {
        let blocks = {
            let receiving = self.receiving.lock();
            let Some(receiver) = receiving.receiver.as_ref() else { return false };
            (receiver.unexecuted_blocks(), self.provided.load(Ordering::Relaxed))
        };
        let mut contents = self.contents.lock();
        let area = contents.as_mut().map(|contents| &mut contents.area);
        let now = self.host.now();
        let mut holding = self.holding.lock();
        self.space.step(&mut holding, (blocks, 0), (now, is_idle), || area) == HoldStep::More
    }
}
