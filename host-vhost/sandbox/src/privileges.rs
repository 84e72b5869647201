//! Capabilities.

use std::fmt;

use caps::{CapSet, Capability};

use crate::SandboxError;

/// What became of the capability sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Whether the bounding set is empty too. Only a process with CAP_SETPCAP can empty it; for another one it bounds
    /// nothing, since without new privileges no exec can gain a capability.
    pub bounding: bool,
}

impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bounding {
            true => write!(f, "no capabilities (bounding set empty)"),
            false => write!(f, "no capabilities (bounding set as inherited: no CAP_SETPCAP)"),
        }
    }
}

/// Empties the bounding (where allowed), ambient, effective, permitted and inheritable sets of the calling thread.
pub fn drop_capabilities() -> Result<Dropped, SandboxError> {
    let fail = |set| move |error| SandboxError::Capabilities { set, error };
    let may = caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).map_err(fail("effective"))?;
    if may {
        caps::clear(None, CapSet::Bounding).map_err(fail("bounding"))?;
    }
    caps::clear(None, CapSet::Ambient).map_err(fail("ambient"))?;
    caps::clear(None, CapSet::Effective).map_err(fail("effective"))?;
    caps::clear(None, CapSet::Permitted).map_err(fail("permitted"))?;
    caps::clear(None, CapSet::Inheritable).map_err(fail("inheritable"))?;
    let left = caps::read(None, CapSet::Bounding).map_err(fail("bounding"))?;
    Ok(Dropped { bounding: left.is_empty() })
}
