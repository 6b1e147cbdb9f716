//! The name by which a program opens a file at its node's mount that it has open through the library: `INODE.TOKEN`
//! in hexadecimal digits, in folder [`FOLDER`] of the mount's root.

use crate::DecodeError;
use crate::ids::InodeNumber;
use std::fmt;

/// Bytes of a token.
pub const TOKEN_BYTES: usize = 16;

/// The folder of the mount's root that contains these names. No listing shows it.
pub const FOLDER: &[u8] = b".hearth-open";

/// Digits of an inode number, and of a token.
const INODE_DIGITS: usize = 16;
const TOKEN_DIGITS: usize = 2 * TOKEN_BYTES;

/// A right to open an inode once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PassName {
    /// The file.
    pub inode: InodeNumber,
    /// The token that SharedFS has created for it.
    pub token: [u8; TOKEN_BYTES],
}

impl fmt::Debug for PassName {
    /// Omits the token, which is a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PassName({:?})", self.inode)
    }
}

impl fmt::Display for PassName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}.{:032x}", self.inode.get(), u128::from_be_bytes(self.token))
    }
}

impl PassName {
    /// Parses a name.
    ///
    /// # Errors
    /// `Field`: the name has another form.
    pub fn decode(name: &[u8]) -> Result<Self, DecodeError> {
        let no = DecodeError::Field("name");
        let (inode, rest) = name.split_at_checked(INODE_DIGITS).ok_or(no)?;
        let token = rest.strip_prefix(b".").filter(|token| token.len() == TOKEN_DIGITS).ok_or(no)?;
        let inode = u64::try_from(number(inode)?).map_err(|_| no)?;
        Ok(Self { inode: InodeNumber::new(inode), token: number(token)?.to_be_bytes() })
    }
}

/// A number of at most 32 digits.
fn number(digits: &[u8]) -> Result<u128, DecodeError> {
    digits.iter().try_fold(0, |number, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return Err(DecodeError::Field("name")),
        };
        Ok(number << 4 | u128::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_name_of_the_exact_form_is_parsed() {
        let pass = PassName { inode: InodeNumber::new(0x1_0000_002a), token: *b"0123456789abcdef" };
        let name = pass.to_string();
        assert_eq!(name, "000000010000002a.30313233343536373839616263646566");
        assert_eq!(PassName::decode(name.as_bytes()), Ok(pass));
        for cut in 0..name.len() {
            assert!(PassName::decode(&name.as_bytes()[..cut]).is_err());
            let mut other = name.clone().into_bytes();
            other[cut] = b'G';
            assert!(PassName::decode(&other).is_err());
        }
        assert!(PassName::decode(format!("{name}0").as_bytes()).is_err());
    }
}
