//! The shared secret of a cluster's nodes, in a file: the identity of the cluster, and its key.
//!
//! ```text
//! cluster 00112233445566778899aabbccddeeff
//! key 0011...eeff
//! ```
//!
//! Only the daemons' user may read the file: a program that has the key can act as a node.

use crate::handshake::{ClusterKey, Identity};
use format::NodeId;
use format::wire::CLUSTER_BYTES;
use ipc::Host;

/// Bytes of the key.
const KEY_BYTES: usize = 32;

/// A cluster's identity and key.
#[derive(Clone)]
pub struct Secret {
    cluster: [u8; CLUSTER_BYTES],
    key: [u8; KEY_BYTES],
}

impl Secret {
    /// Creates the secret of a new cluster.
    pub fn generate(host: &dyn Host) -> Self {
        Self { cluster: crate::handshake::nonce(host), key: crate::handshake::nonce(host) }
    }

    /// Parses the text of a file; `None` if it has another form.
    pub fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let cluster = from_hex(lines.next()?.strip_prefix("cluster ")?)?;
        let key = from_hex(lines.next()?.strip_prefix("key ")?)?;
        lines.next().is_none().then_some(Self { cluster, key })
    }

    /// The text of the file.
    pub fn text(&self) -> String {
        format!("cluster {}\nkey {}\n", hex(&self.cluster), hex(&self.key))
    }

    /// The identity of a node of the cluster.
    pub fn identity(&self, node: NodeId) -> Identity {
        Identity { cluster: self.cluster, key: ClusterKey::new(self.key), node }
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Secret({})", hex(&self.cluster))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits: Vec<u8> =
        text.chars().map(|digit| digit.to_digit(16).map(|value| value as u8)).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    (digits.len() == 2 * N).then(|| bytes.try_into().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::SystemHost;

    #[test]
    fn a_secret_is_read_as_it_was_written() {
        let secret = Secret::generate(&SystemHost);
        let read = Secret::parse(&secret.text()).unwrap();
        assert_eq!((read.cluster, read.key), (secret.cluster, secret.key));
        assert!(!format!("{read:?}").contains(&hex(&secret.key)), "a key is shown to nobody");
    }

    #[test]
    fn what_is_no_secret_is_refused() {
        let right = Secret::generate(&SystemHost).text();
        let no_line = right.lines().next().unwrap().to_owned();
        let short = right.trim_end()[..right.len() - 2].to_owned();
        let wrong = ["".to_owned(), no_line, short, right.replace("key ", "key x"), right.clone() + "more\n"];
        for text in wrong {
            assert!(Secret::parse(&text).is_none(), "{text}");
        }
    }
}
