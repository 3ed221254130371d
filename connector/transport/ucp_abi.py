"""libucp's structures and callbacks for ctypes, as `ucp/api/ucp.h` has them; each says by a mask which fields count."""

import ctypes
from ctypes import Structure, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

ON_MESSAGE = ctypes.CFUNCTYPE(c_int8, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p)
ON_SENT = ctypes.CFUNCTYPE(None, c_void_p, c_int8, c_void_p)
ON_RECEIVED = ctypes.CFUNCTYPE(None, c_void_p, c_int8, c_size_t, c_void_p)
ON_CONNECT = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
ON_ERROR = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int8)


class Params(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
        ("node_local_id", c_size_t),
    )


class WorkerParams(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", c_uint64 * 16),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
        ("am_alignment", c_size_t),
        ("client_id", c_uint64),
    )


class SocketAddress(Structure):
    _fields_ = (("address", c_void_p), ("size", c_uint32))


class Handler(Structure):
    _fields_ = (("callback", c_void_p), ("argument", c_void_p))


class ListenerParams(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("sockaddr", SocketAddress),
        ("accept_handler", Handler),
        ("conn_handler", Handler),
    )


class ListenerAttributes(Structure):
    _fields_ = (("field_mask", c_uint64), ("sockaddr", c_uint64 * 16))  # a sockaddr_storage


class EndpointParams(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("err_mode", c_int),
        ("err_handler", Handler),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr", SocketAddress),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr", SocketAddress),
    )


class RequestParam(Structure):
    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    )


class HandlerParam(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("id", c_uint),
        ("flags", c_uint32),
        ("callback", c_void_p),
        ("argument", c_void_p),
    )


class ReceiveParam(Structure):
    _fields_ = (("recv_attr", c_uint64), ("reply_ep", c_void_p))
