//! The decisions of the handshake by which two nodes authenticate each other. The module neither sends nor waits.
//!
//! The messages on the control channel are Request, Hello, Challenge, Proof and Welcome; the connect token follows
//! with the connection itself. Each side proves that it has the cluster's key, with a MAC over all earlier messages
//! of both sides. These include a nonce of the checking side, so a recorded message is not accepted again. The input
//! of each MAC begins with a string for its role, so a proof cannot be reflected to its sender or used for another
//! message. Later traffic is neither signed nor encrypted; the network has to protect it. See `docs/protocol.md`.

use crate::settings::{MESSAGE_BYTES_MIN, WINDOW_MIN};
use format::wire::{
    CLUSTER_BYTES, NONCE_BYTES, PROOF_BYTES, REQUEST_PROOF_BYTES, RefusalReason, WIRE_MAGIC, WIRE_VERSION,
    WIRE_VERSION_MIN, WireChallenge, WireConnectToken, WireHello, WireProof, WireRequest, WireWelcome,
    common_version,
};
use format::{Epoch, NodeId};
use hmac::{Hmac, KeyInit, Mac};
use ipc::Host;
use sha2::Sha256;
use std::collections::{HashSet, VecDeque};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32};

/// The secret key that all nodes of a cluster share.
#[derive(Clone)]
pub struct ClusterKey([u8; 32]);

impl ClusterKey {
    /// A key, from a file that only the daemon's user can read.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    fn mac(&self, role: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(role);
        parts.iter().for_each(|part| mac.update(part));
        mac
    }

    fn sign(&self, role: &[u8], parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
        self.mac(role, parts).finalize().into_bytes().into()
    }
}

impl std::fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ClusterKey")
    }
}

const REQUESTS: &[u8] = b"hearth 1 request\0";
const ACCEPTS: &[u8] = b"hearth 1 acceptor\0";
const INITIATES: &[u8] = b"hearth 1 initiator\0";
const WELCOMES: &[u8] = b"hearth 1 welcome\0";
const CONNECTS: &[u8] = b"hearth 1 token\0";

/// The identity of a node towards other nodes.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Identity of the cluster.
    pub cluster: [u8; CLUSTER_BYTES],
    /// Key of the cluster.
    pub key: ClusterKey,
    /// Id of the node.
    pub node: NodeId,
}

/// The limits within which a node accepts messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub message_bytes: u32,
    pub window: u32,
}

/// The result of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreed {
    pub node: NodeId,
    pub epoch: Epoch,
    pub version: u8,
    /// The peer's limits.
    pub window: Window,
}

pub(crate) fn nonce<const N: usize>(host: &dyn Host) -> [u8; N] {
    let mut bytes = [0; N];
    for part in bytes.chunks_mut(8) {
        part.copy_from_slice(&host.random().to_le_bytes()[..part.len()]);
    }
    bytes
}

/// Creates the request of a node, the first message of a handshake.
pub(crate) fn connect_request(identity: &Identity, host: &dyn Host) -> WireRequest {
    let mut request = WireRequest {
        magic: WIRE_MAGIC,
        version_min: WIRE_VERSION_MIN,
        version_max: WIRE_VERSION,
        cluster: identity.cluster,
        nonce: nonce(host),
        proof: [0; REQUEST_PROOF_BYTES],
    };
    let proof = identity.key.sign(REQUESTS, &[request.claim()]);
    request.proof.copy_from_slice(&proof[..REQUEST_PROOF_BYTES]);
    request
}

/// Checks a request, and returns its nonce.
pub(crate) fn check_request(identity: &Identity, bytes: &[u8]) -> Result<[u8; 16], RefusalReason> {
    let request = WireRequest::decode(bytes).map_err(|_| RefusalReason::Malformed)?;
    common_version(request.version_min, request.version_max).ok_or(RefusalReason::Version)?;
    if request.cluster != identity.cluster {
        return Err(RefusalReason::Cluster);
    }
    let mac = identity.key.mac(REQUESTS, &[request.claim()]);
    mac.verify_truncated_left(&request.proof).map_err(|_| RefusalReason::Key)?;
    Ok(request.nonce)
}

/// Nonces of recent requests: a request opens one handshake only, while its nonce is remembered.
#[derive(Default)]
pub(crate) struct RecentRequests {
    known: HashSet<[u8; 16]>,
    order: VecDeque<[u8; 16]>,
}

/// Number of nonces that are remembered.
const REQUESTS_MAX: usize = 4096;

impl RecentRequests {
    /// Remembers the nonce of a valid request; false if the nonce is known.
    pub fn add(&mut self, nonce: [u8; 16]) -> bool {
        if !self.known.insert(nonce) {
            return false;
        }
        self.order.push_back(nonce);
        if self.order.len() > REQUESTS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        true
    }
}

/// The state of the connecting side.
pub(crate) struct Initiator {
    hello: WireHello,
}

impl Initiator {
    pub fn new(identity: &Identity, epoch: Epoch, to: NodeId, window: Window, host: &dyn Host) -> Self {
        let hello = WireHello {
            version_min: WIRE_VERSION_MIN,
            version_max: WIRE_VERSION,
            reserved: U16::new(0),
            epoch,
            from: identity.node,
            to,
            cluster: identity.cluster,
            nonce: nonce::<NONCE_BYTES>(host),
            message_bytes: U32::new(window.message_bytes),
            window: U32::new(window.window),
        };
        Self { hello }
    }

    pub fn hello(&self) -> &WireHello {
        &self.hello
    }

    /// Checks the Challenge.
    pub fn check(&self, identity: &Identity, challenge: &WireChallenge) -> Result<Agreed, RefusalReason> {
        let said = [self.hello.as_bytes(), challenge.claim()];
        identity.key.mac(ACCEPTS, &said).verify_slice(&challenge.proof).map_err(|_| RefusalReason::Key)?;
        if !(WIRE_VERSION_MIN..=WIRE_VERSION).contains(&challenge.version) {
            return Err(RefusalReason::Version);
        }
        if challenge.from != self.hello.to {
            return Err(RefusalReason::Node);
        }
        check_epoch(challenge.epoch, self.hello.epoch)?;
        Ok(Agreed {
            node: challenge.from,
            epoch: challenge.epoch,
            version: challenge.version,
            window: window(challenge.message_bytes, challenge.window)?,
        })
    }

    /// Creates the Proof after a valid Challenge; the connection will come from `port`.
    pub fn answer(&self, identity: &Identity, challenge: &WireChallenge, port: u16) -> WireProof {
        let mut proof = WireProof { port: U16::new(port), reserved: U16::new(0), proof: [0; PROOF_BYTES] };
        let said = [self.hello.as_bytes(), challenge.as_bytes(), proof.claim()];
        proof.proof = identity.key.sign(INITIATES, &said);
        proof
    }

    /// Checks the Welcome, and returns the connect token.
    pub fn check_welcome(
        &self,
        identity: &Identity,
        challenge: &WireChallenge,
        proof: &WireProof,
        welcome: &WireWelcome,
    ) -> Result<WireConnectToken, RefusalReason> {
        let said = [self.hello.as_bytes(), challenge.as_bytes(), proof.as_bytes(), welcome.claim()];
        identity.key.mac(WELCOMES, &said).verify_slice(&welcome.proof).map_err(|_| RefusalReason::Key)?;
        Ok(connect_token(
            identity,
            [self.hello.as_bytes(), challenge.as_bytes(), proof.as_bytes(), welcome.as_bytes()],
        ))
    }
}

/// Creates the connect token.
fn connect_token(identity: &Identity, said: [&[u8]; 4]) -> WireConnectToken {
    WireConnectToken { magic: WIRE_MAGIC, proof: identity.key.sign(CONNECTS, &said) }
}

/// Checks the connect token of a connection, in constant time.
pub(crate) fn check_token(
    identity: &Identity,
    wanted: &WireConnectToken,
    bytes: &[u8],
) -> Result<(), RefusalReason> {
    let token = WireConnectToken::decode(bytes).map_err(|_| RefusalReason::Malformed)?;
    let twice = |token: &WireConnectToken| identity.key.mac(CONNECTS, &[&token.proof]);
    let mac = twice(wanted).finalize().into_bytes();
    twice(&token).verify(&mac).map_err(|_| RefusalReason::Key)
}

/// The state of the accepting side after the Hello.
pub(crate) struct Acceptor {
    hello: WireHello,
    challenge: WireChallenge,
    window: Window,
}

impl Acceptor {
    /// Checks a Hello, and creates the Challenge. Epoch and membership are checked after the Proof, so that only
    /// members learn them.
    pub fn new(
        identity: &Identity,
        epoch: Epoch,
        hello: &WireHello,
        own: Window,
        host: &dyn Host,
    ) -> Result<Self, RefusalReason> {
        let version = common_version(hello.version_min, hello.version_max).ok_or(RefusalReason::Version)?;
        if hello.cluster != identity.cluster {
            return Err(RefusalReason::Cluster);
        }
        if hello.to != identity.node || hello.from == identity.node {
            return Err(RefusalReason::Node);
        }
        let mut challenge = WireChallenge {
            version,
            reserved: 0,
            reserved2: U16::new(0),
            epoch,
            from: identity.node,
            message_bytes: U32::new(own.message_bytes),
            window: U32::new(own.window),
            nonce: nonce::<NONCE_BYTES>(host),
            proof: [0; PROOF_BYTES],
        };
        challenge.proof = identity.key.sign(ACCEPTS, &[hello.as_bytes(), challenge.claim()]);
        let window = window(hello.message_bytes, hello.window)?;
        Ok(Self { hello: *hello, challenge, window })
    }

    pub fn challenge(&self) -> &WireChallenge {
        &self.challenge
    }

    /// Checks the Proof.
    pub fn check(&self, identity: &Identity, proof: &WireProof) -> Result<Agreed, RefusalReason> {
        let said = [self.hello.as_bytes(), self.challenge.as_bytes(), proof.claim()];
        identity.key.mac(INITIATES, &said).verify_slice(&proof.proof).map_err(|_| RefusalReason::Key)?;
        check_epoch(self.hello.epoch, self.challenge.epoch)?;
        Ok(Agreed {
            node: self.hello.from,
            epoch: self.hello.epoch,
            version: self.challenge.version,
            window: self.window,
        })
    }

    /// Creates the Welcome after a valid Proof: the acceptor expects the initiator at `port`, with the returned
    /// token.
    pub fn welcome(
        &self,
        identity: &Identity,
        proof: &WireProof,
        port: u16,
    ) -> (WireWelcome, WireConnectToken) {
        let mut welcome =
            WireWelcome { port: U16::new(port), reserved: U16::new(0), proof: [0; PROOF_BYTES] };
        let [hello, challenge] = [self.hello.as_bytes(), self.challenge.as_bytes()];
        welcome.proof = identity.key.sign(WELCOMES, &[hello, challenge, proof.as_bytes(), welcome.claim()]);
        let token = connect_token(identity, [hello, challenge, proof.as_bytes(), welcome.as_bytes()]);
        (welcome, token)
    }
}

/// Compares epochs: nodes communicate only within one epoch, and a node that is behind has to catch up first.
pub(crate) fn check_epoch(theirs: Epoch, own: Epoch) -> Result<(), RefusalReason> {
    match theirs.cmp(&own) {
        std::cmp::Ordering::Less => Err(RefusalReason::OldEpoch),
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Greater => Err(RefusalReason::NewEpoch),
    }
}

fn window(message_bytes: U32, window: U32) -> Result<Window, RefusalReason> {
    if message_bytes.get() < MESSAGE_BYTES_MIN || window.get() < WINDOW_MIN {
        return Err(RefusalReason::Malformed);
    }
    Ok(Window { message_bytes: message_bytes.get(), window: window.get() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::SystemHost;

    const OWN: Window = Window { message_bytes: 200, window: 8 };

    fn node(number: u32, key: u8) -> Identity {
        Identity { cluster: [7; 16], key: ClusterKey::new([key; 32]), node: NodeId::new(number) }
    }

    fn initiator(identity: &Identity, epoch: u32) -> Initiator {
        Initiator::new(identity, Epoch::new(epoch), NodeId::new(2), OWN, &SystemHost)
    }

    fn acceptor(hello: &WireHello, epoch: u32) -> Result<Acceptor, RefusalReason> {
        Acceptor::new(&node(2, 1), Epoch::new(epoch), hello, OWN, &SystemHost)
    }

    #[test]
    fn two_members_agree() {
        let one = node(1, 1);
        let first = initiator(&one, 5);
        let second = acceptor(first.hello(), 5).unwrap();
        let theirs = first.check(&one, second.challenge()).unwrap();
        let proof = first.answer(&one, second.challenge(), 1234);
        let ours = second.check(&node(2, 1), &proof).unwrap();
        let (welcome, wanted) = second.welcome(&node(2, 1), &proof, 4321);
        let token = first.check_welcome(&one, second.challenge(), &proof, &welcome).unwrap();
        assert_eq!(check_token(&node(2, 1), &wanted, token.as_bytes()), Ok(()));
        assert_eq!((theirs.node, ours.node), (NodeId::new(2), NodeId::new(1)));
        assert_eq!((theirs.epoch, ours.epoch, ours.version), (Epoch::new(5), Epoch::new(5), WIRE_VERSION));
    }

    #[test]
    fn each_thing_that_does_not_fit_has_its_refusal() {
        let hello = *initiator(&node(1, 1), 5).hello();
        let refused = |hello: WireHello| acceptor(&hello, 5).map(|_| ()).unwrap_err();
        assert_eq!(refused(WireHello { version_min: 9, version_max: 9, ..hello }), RefusalReason::Version);
        assert_eq!(refused(WireHello { cluster: [8; 16], ..hello }), RefusalReason::Cluster);
        assert_eq!(refused(WireHello { to: NodeId::new(3), ..hello }), RefusalReason::Node);
        assert_eq!(refused(WireHello { from: NodeId::new(2), ..hello }), RefusalReason::Node);
        assert_eq!(refused(WireHello { window: U32::new(0), ..hello }), RefusalReason::Malformed);
    }

    /// Without this check of the acceptor, an expelled node that skips its own check would be accepted.
    #[test]
    fn the_acceptor_itself_refuses_another_epoch() {
        let one = node(1, 1);
        for (theirs, reason) in [(4, RefusalReason::OldEpoch), (6, RefusalReason::NewEpoch)] {
            let first = initiator(&one, theirs);
            let second = acceptor(first.hello(), 5).unwrap();
            let proof = first.answer(&one, second.challenge(), 0);
            assert_eq!(second.check(&node(2, 1), &proof), Err(reason));
        }
    }

    #[test]
    fn the_initiator_refuses_an_acceptor_of_another_epoch() {
        let one = node(1, 1);
        for (theirs, reason) in [(4, RefusalReason::OldEpoch), (6, RefusalReason::NewEpoch)] {
            let first = initiator(&one, 5);
            let second = acceptor(first.hello(), theirs).unwrap();
            assert_eq!(first.check(&one, second.challenge()).unwrap_err(), reason);
        }
    }

    #[test]
    fn nothing_recorded_proves_anything_again() {
        let one = node(1, 1);
        let first = initiator(&one, 5);
        let second = acceptor(first.hello(), 5).unwrap();
        let proof = first.answer(&one, second.challenge(), 0);
        let again = acceptor(first.hello(), 5).unwrap();
        assert_eq!(again.check(&node(2, 1), &proof), Err(RefusalReason::Key), "a proof was accepted twice");
        let other = initiator(&one, 5);
        assert_eq!(other.check(&one, second.challenge()).unwrap_err(), RefusalReason::Key);
        let (welcome, token) = second.welcome(&node(2, 1), &proof, 7);
        let later = other.answer(&one, again.challenge(), 0);
        assert_eq!(other.check_welcome(&one, again.challenge(), &later, &welcome), Err(RefusalReason::Key));
        let (_, wanted) = again.welcome(&node(2, 1), &later, 7);
        assert_eq!(check_token(&node(2, 1), &wanted, token.as_bytes()), Err(RefusalReason::Key));
    }

    #[test]
    fn a_proof_is_not_taken_back_from_its_maker() {
        let one = node(1, 1);
        let first = initiator(&one, 5);
        let second = acceptor(first.hello(), 5).unwrap();
        let proof = first.answer(&one, second.challenge(), 0);
        let reflected = WireProof { proof: second.challenge().proof, ..proof };
        assert_eq!(second.check(&node(2, 1), &reflected), Err(RefusalReason::Key));
        let (welcome, _) = second.welcome(&node(2, 1), &proof, 0);
        for back in [second.challenge().proof, proof.proof] {
            let reflected = WireWelcome { proof: back, ..welcome };
            assert_eq!(
                first.check_welcome(&one, second.challenge(), &proof, &reflected),
                Err(RefusalReason::Key)
            );
        }
    }

    #[test]
    fn a_port_that_was_changed_on_its_way_is_found() {
        let one = node(1, 1);
        let first = initiator(&one, 5);
        let second = acceptor(first.hello(), 5).unwrap();
        let proof = first.answer(&one, second.challenge(), 1234);
        let changed = WireProof { port: U16::new(1235), ..proof };
        assert_eq!(second.check(&node(2, 1), &changed), Err(RefusalReason::Key));
        let (welcome, wanted) = second.welcome(&node(2, 1), &proof, 4321);
        let changed = WireWelcome { port: U16::new(4322), ..welcome };
        assert_eq!(first.check_welcome(&one, second.challenge(), &proof, &changed), Err(RefusalReason::Key));
        let mut token = first.check_welcome(&one, second.challenge(), &proof, &welcome).unwrap();
        token.proof[31] ^= 1;
        assert_eq!(check_token(&node(2, 1), &wanted, token.as_bytes()), Err(RefusalReason::Key));
        let short = &wanted.as_bytes()[..30];
        assert_eq!(check_token(&node(2, 1), &wanted, short), Err(RefusalReason::Malformed));
    }

    #[test]
    fn another_key_is_found_by_either_side() {
        let stranger = node(1, 9);
        let first = initiator(&stranger, 5);
        let second = acceptor(first.hello(), 5).unwrap();
        assert_eq!(first.check(&stranger, second.challenge()).unwrap_err(), RefusalReason::Key);
        let proof = first.answer(&stranger, second.challenge(), 0);
        assert_eq!(second.check(&node(2, 1), &proof), Err(RefusalReason::Key));
    }

    #[test]
    fn knocks_are_judged() {
        let right = connect_request(&node(1, 1), &SystemHost);
        let judge = |request: &WireRequest| check_request(&node(2, 1), request.as_bytes());
        assert_eq!(judge(&right), Ok(right.nonce));
        assert_eq!(judge(&connect_request(&node(1, 9), &SystemHost)), Err(RefusalReason::Key));
        assert_eq!(judge(&WireRequest { cluster: [1; 16], ..right }), Err(RefusalReason::Cluster));
        assert_eq!(
            judge(&WireRequest { version_min: 9, version_max: 9, ..right }),
            Err(RefusalReason::Version)
        );
        assert_eq!(judge(&WireRequest { magic: *b"GET ", ..right }), Err(RefusalReason::Malformed));
        let mut changed = right;
        changed.nonce[3] ^= 1;
        assert_eq!(judge(&changed), Err(RefusalReason::Key));
        assert_eq!(check_request(&node(2, 1), &right.as_bytes()[..50]), Err(RefusalReason::Malformed));
    }
    #[test]
    fn a_knock_is_heard_once_and_few_are_remembered() {
        let mut requests = RecentRequests::default();
        let number = |number: usize| (number as u128).to_le_bytes();
        for request in 0..2 * REQUESTS_MAX {
            assert!(requests.add(number(request)));
            assert!(!requests.add(number(request)));
        }
        assert_eq!((requests.known.len(), requests.order.len()), (REQUESTS_MAX, REQUESTS_MAX));
        assert!(!requests.add(number(REQUESTS_MAX)));
        assert!(requests.add(number(0)));
    }
}
