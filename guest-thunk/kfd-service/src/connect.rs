//! The start of a service.

use std::error::Error;
use std::fmt;

use guest_thunk::thunk::topology as thunk;
use guest_thunk::transport::own;
use kfd_seam::hidden;
use virtio_kfd_protocol::Apertures;

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
        own::keep_by(own::Keeper { opened: hidden::keep, closing: hidden::show });
        let client = Arc::new(Client::connect().map_err(StartError::Connect)?);
        // Where it fails, each use opens what it reads, and tells of that.
        let _ = fresh::prepare();
        let (tree, gpus) = topology::read(&client).map_err(StartError::Topology)?;
        let known = |(node, gpu): (u32, &Gpu)| thunk::Gpu {
            node,
            gpu_id: gpu.gpu_id,
            apertures: Apertures::default(),
            device: None,
            hdp_registers: None,
        };
        let snapshot = Snapshot { gpus: (0..).zip(&gpus).map(known).collect(), ..Default::default() };
        Ok(Self {
            smi: Smi::default(),
            objects: Objects::default(),
            bos: Bos::default(),
            memory: Memory::default(),
            snapshot,
            settings: Settings::from_environment(),
            buffers: Buffers::default(),
            doorbells: Doorbells::new(&client),
            queues: Queues::default(),
            event_page: EventPage::default(),
            files: Mutex::default(),
            tree,
            gpus,
            client,
        })
    }

    /// Which open render node a descriptor of the process is, and of which GPU, by its index; `None` for anything else.
    pub(crate) fn render_node(&self, descriptor: u32) -> Option<(FileId, usize)> {
        let number = i32::try_from(descriptor).ok().filter(|number| *number >= 0)?;
        match lock(&self.files).of_descriptor(number)? {
            (file, OpenFile::Render(index)) => Some((file, index)),
            (_, OpenFile::Kfd) => None,
        }
    }
}
