//! Extended attributes.

use crate::abi::{Body, GetxattrIn, InHeader, SetxattrIn, SizeOut};
use crate::callers::caller;
use crate::gateway::{Answer, Gateway, node};
use crate::reply::Reply;
use vfs::Error;
use vfs::engine::SetXattr;

/// Answers with a value or list, or with its size if the request has no space for it.
fn tell(value: &[u8], room: u32, reply: &mut Reply) -> Result<Answer, Error> {
    if room == 0 {
        reply.put(&SizeOut { bytes: value.len() as u32, unused: 0 });
    } else if value.len() > room as usize {
        return Err(Error::OutOfRange);
    } else {
        reply.put_bytes(value);
    }
    Ok(Answer::Ready)
}

impl Gateway {
    pub(crate) fn get_xattr(
        &self,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: GetxattrIn = body.take()?;
        let value = self.engine.get_xattr(&caller(header), node(header), body.string()?)?;
        tell(&value, fields.bytes, reply)
    }

    pub(crate) fn list_xattrs(
        &self,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: GetxattrIn = body.take()?;
        let list = self.engine.list_xattrs(&caller(header), node(header))?;
        tell(&list, fields.bytes, reply)
    }

    pub(crate) fn set_xattr(&self, header: &InHeader, body: &mut Body<'_>) -> Result<Answer, Error> {
        let fields: SetxattrIn = body.take()?;
        let how = SetXattr::of_flags(fields.flags)?;
        let (name, value) = (body.string()?, body.bytes(fields.bytes)?);
        self.engine.set_xattr(&caller(header), node(header), name, value, how)?;
        Ok(Answer::Ready)
    }

    pub(crate) fn remove_xattr(&self, header: &InHeader, body: &mut Body<'_>) -> Result<Answer, Error> {
        self.engine.remove_xattr(&caller(header), node(header), body.string()?)?;
        Ok(Answer::Ready)
    }
}
