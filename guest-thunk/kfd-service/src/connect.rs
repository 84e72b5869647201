//! The start of a service.

use std::error::Error;
use std::fmt;

use super::*;

/// Why there is no service.
#[derive(Debug)]
pub enum StartError {
    /// No host.
    Connect(ConnectError),
    /// The host's topology cannot be shown.
    Topology(TopologyError),
}

impl fmt::Display for StartError {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Connect(error) => write!(to, "{error}"),
            StartError::Topology(error) => write!(to, "the host's topology: {error}"),
        }
    }
}

impl Error for StartError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            StartError::Connect(error) => Some(error),
            StartError::Topology(error) => Some(error),
        }
    }
}

impl GuestKfd {
    /// Connects as guest-thunk's client does, and reads the topology.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn connect() -> std::result::Result<Self, StartError> {
        let client = Client::connect().map_err(StartError::Connect)?;
        let (tree, gpus) = topology::read(&client).map_err(StartError::Topology)?;
        Ok(Self {
            buffers: Buffers::default(),
            doorbells: Doorbells::default(),
            queues: Queues::default(),
            files: Mutex::default(),
            tree,
            gpus,
            client,
        })
    }

    /// Which open render node a descriptor of the process is; `None` for anything else.
    pub(crate) fn render_node(&self, descriptor: u32) -> Option<usize> {
        let number = i32::try_from(descriptor).ok().filter(|number| *number >= 0)?;
        match lock(&self.files).of_descriptor(number)? {
            OpenFile::Render(index) => Some(index),
            OpenFile::Kfd => None,
        }
    }
}
