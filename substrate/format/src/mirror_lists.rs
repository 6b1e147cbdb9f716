//! Lists of messages between a head and its copies whose elements have different lengths.
//!
//! A list is checked as a whole when its message is decoded; reading it cannot fail afterwards.

use crate::DecodeError;
use crate::mirror::{DataPart, MirrorItem};
use crate::node::{Key, VALUE_BYTES_MAX};
use zerocopy::FromBytes;

/// A part, and its bytes.
type PartOfData<'a> = (DataPart, &'a [u8]);

/// The parts of a `Data` message, which were checked before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataParts<'a>(&'a [u8]);

impl<'a> DataParts<'a> {
    pub(crate) fn check(bytes: &'a [u8], count: usize) -> Result<Self, DecodeError> {
        let (mut found, mut left) = (0, bytes);
        while !left.is_empty() {
            (_, left) = Self::split(left)?;
            found += 1;
        }
        if found == count { Ok(Self(bytes)) } else { Err(DecodeError::Field("count")) }
    }

    fn split(bytes: &'a [u8]) -> Result<(PartOfData<'a>, &'a [u8]), DecodeError> {
        let (part, rest) = DataPart::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
        let bytes = part.check()?;
        let (data, rest) = rest.split_at_checked(bytes).ok_or(DecodeError::Truncated)?;
        Ok(((part, data), rest))
    }
}

impl<'a> Iterator for DataParts<'a> {
    type Item = PartOfData<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let (part, rest) = Self::split(self.0).expect("checked when the message was taken apart");
        self.0 = rest;
        Some(part)
    }
}

/// An item, and its value.
type ItemOfTree<'a> = (MirrorItem, &'a [u8]);

/// The items of an `Items` message, which were checked before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Items<'a>(&'a [u8]);

impl<'a> Items<'a> {
    pub(crate) fn check(bytes: &'a [u8], count: usize) -> Result<Self, DecodeError> {
        let (mut found, mut left, mut last) = (0, bytes, None);
        while !left.is_empty() {
            let ((item, _), rest) = Self::split(left)?;
            if last.is_some_and(|last: Key| last >= item.key) {
                return Err(DecodeError::Field("key"));
            }
            (last, left) = (Some(item.key), rest);
            found += 1;
        }
        if found == count { Ok(Self(bytes)) } else { Err(DecodeError::Field("count")) }
    }

    fn split(bytes: &'a [u8]) -> Result<(ItemOfTree<'a>, &'a [u8]), DecodeError> {
        let (item, rest) = MirrorItem::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
        item.key.kind()?;
        let bytes = usize::from(item.bytes.get());
        if bytes > VALUE_BYTES_MAX {
            return Err(DecodeError::Field("bytes"));
        }
        let (value, rest) = rest.split_at_checked(bytes).ok_or(DecodeError::Truncated)?;
        Ok(((item, value), rest))
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = ItemOfTree<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let (item, rest) = Self::split(self.0).expect("checked when the message was taken apart");
        self.0 = rest;
        Some(item)
    }
}
