//! The name by which a program opens a file at its node's mount that it has open through the library: `INODE.TOKEN`
//! in hexadecimal digits, in folder [`FOLDER`] of the mount's root. If the kernel refuses to open the file because of its
//! mode, `INODE.TOKEN.create` opens it with `O_CREAT`.

use crate::DecodeError;
use crate::ids::InodeNumber;
use std::fmt;

/// Bytes of a token.
pub const TOKEN_BYTES: usize = 16;

/// The folder of the mount's root that contains these names. No listing shows it.
pub const FOLDER: &[u8] = b".hearth-open";

/// The end of a name that is opened with `O_CREAT`.
const CREATE: &str = ".create";

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
    /// The name is opened with `O_CREAT`.
    pub creates: bool,
}

impl fmt::Debug for PassName {
    /// Omits the token, which is a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PassName({:?})", self.inode)
    }
}

impl fmt::Display for PassName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = if self.creates { CREATE } else { "" };
        write!(f, "{:016x}.{:032x}{end}", self.inode.get(), u128::from_be_bytes(self.token))
    }
}

impl PassName {
    /// Parses a name.
    ///
    /// # Errors
    /// `Field`: the name has another form.
    pub fn decode(name: &[u8]) -> Result<Self, DecodeError> {
        let no = DecodeError::Field("name");
        let plain = name.strip_suffix(CREATE.as_bytes());
        let (name, creates) = plain.map_or((name, false), |plain| (plain, true));
        let (inode, rest) = name.split_at_checked(INODE_DIGITS).ok_or(no)?;
        let token = rest.strip_prefix(b".").filter(|token| token.len() == TOKEN_DIGITS).ok_or(no)?;
        let inode = u64::try_from(number(inode)?).map_err(|_| no)?;
        Ok(Self { inode: InodeNumber::new(inode), token: number(token)?.to_be_bytes(), creates })
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
        let mut pass =
            PassName { inode: InodeNumber::new(0x1_0000_002a), token: *b"0123456789abcdef", creates: false };
        let plain = "000000010000002a.30313233343536373839616263646566";
        for (creates, name) in [(false, plain.to_owned()), (true, format!("{plain}.create"))] {
            pass.creates = creates;
            assert_eq!(pass.to_string(), name);
            assert_eq!(PassName::decode(name.as_bytes()), Ok(pass));
            for cut in 0..name.len() {
                assert!(name[..cut] == *plain || PassName::decode(&name.as_bytes()[..cut]).is_err());
                let mut other = name.clone().into_bytes();
                other[cut] = b'G';
                assert!(PassName::decode(&other).is_err());
            }
            assert!(PassName::decode(format!("{name}0").as_bytes()).is_err());
            assert!(PassName::decode(format!("{name}.create.create").as_bytes()).is_err());
        }
    }
}
