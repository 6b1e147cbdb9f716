//! Communication between one LibFS (the library in a program) and its SharedFS (the daemon of the node): handshake,
//! passing of descriptors, request rings, shared memory words, and all waiting of both.
//!
//! LibFS runs inside programs of other authors. So the parts of this crate that LibFS uses make their own system
//! calls (the program's `errno` stays unchanged, and no interposed symbol is called by mistake), start no thread
//! and print nothing.

pub mod alive;
pub mod alone;
pub mod barrier;
pub mod claims;
pub mod error;
pub mod event_counter;
pub mod host;
pub mod lock;
pub mod pages;
pub mod peer;
pub mod processors;
pub mod ring;
pub mod shared;
pub mod socket;
pub mod sync;
pub mod sys;
pub mod words;

pub use alive::{Alive, AliveView, AliveWord, Life};
pub use alone::{is_alone, note_sharing};
pub use claims::Claims;
pub use error::Error;
pub use event_counter::EventCounter;
pub use host::{Host, Join, Spin, SystemHost, Time, WAKE_ALL, Waited, pause, wait_until};
pub use lock::{Guard, Lock};
pub use pages::{ClientPages, DaemonPages, DaemonView, Digested};
pub use peer::{Credentials, Peer};
pub use processors::{Processors, Side};
pub use ring::{Call, Link, Response, RingClient, RingLimits, RingServer, Taken};
pub use shared::{Access, Mapping, Reads, Words};
pub use socket::{Connection, Listener, Message};
pub use sync::{LongWord, Word};
pub use sys::{Descriptor, Keeper, pass_no_descriptors_on, pin_to_one_core};
