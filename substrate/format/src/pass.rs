//! The name by which a program opens a file at its node's mount that it has open through the library: `INODE.TOKEN`
//! in hexadecimal digits and a letter ([`Opening`]), in folder [`FOLDER`] of the mount's root.

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

/// How a name is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// `r`: to read.
    Read,
    /// `w`: to write.
    Write,
    /// `b`: to do both.
    Both,
    /// `c`: with `O_CREAT`, because the kernel refuses to open the file that it has looked up, for its mode.
    Create,
}

impl Opening {
    const ALL: [(Self, u8); 4] =
        [(Self::Read, b'r'), (Self::Write, b'w'), (Self::Both, b'b'), (Self::Create, b'c')];

    fn letter(self) -> char {
        let of = Self::ALL.iter().find(|(opening, _)| *opening == self);
        of.map_or('c', |(_, letter)| char::from(*letter))
    }
}

/// A right to open an inode once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PassName {
    /// The file.
    pub inode: InodeNumber,
    /// The token that SharedFS has created for it.
    pub token: [u8; TOKEN_BYTES],
    /// How the name is opened.
    pub opening: Opening,
}

impl fmt::Debug for PassName {
    /// Omits the token, which is a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PassName({:?})", self.inode)
    }
}

impl fmt::Display for PassName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (inode, token) = (self.inode.get(), u128::from_be_bytes(self.token));
        write!(f, "{inode:016x}.{token:032x}.{}", self.opening.letter())
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
        let (token, end) =
            rest.strip_prefix(b".").and_then(|rest| rest.split_at_checked(TOKEN_DIGITS)).ok_or(no)?;
        let &[b'.', letter] = end else { return Err(no) };
        let opening = Opening::ALL.iter().find(|(_, of)| *of == letter).ok_or(no)?.0;
        let inode = u64::try_from(number(inode)?).map_err(|_| no)?;
        Ok(Self { inode: InodeNumber::new(inode), token: number(token)?.to_be_bytes(), opening })
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
        for (opening, letter) in Opening::ALL {
            let pass =
                PassName { inode: InodeNumber::new(0x1_0000_002a), token: *b"0123456789abcdef", opening };
            let name = pass.to_string();
            let end = char::from(letter);
            assert_eq!(name, format!("000000010000002a.30313233343536373839616263646566.{end}"));
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
}
